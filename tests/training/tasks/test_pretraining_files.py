"""Plain text as task streams: how the rows of a step are divided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from albert_serve.tokenizer import AlbertTokenizer
from tests.training.support import make_part, make_shards
from training.errors import RunError
from training.loop.distributed import World
from training.tasks.pretraining.files import TextStreams


@pytest.fixture
def text_streams(vocab_dir: Path) -> Any:
    """Return a function that creates streams of 12 rows of 8 tokens, with some values changed."""
    rows = {"num_rows": 12, "rows_option": "--batch-size 12", "length": 8, "max_batch_tokens": 1024}
    examples = {"sentence_task": "sop", "short_rate": 0.1, "mask_rate": 0.15, "seed": 0}
    values: dict[str, Any] = {
        **rows,
        **examples,
        "shards": make_shards(make_part([[4, 4]] * 30)),
        "tokenizer": AlbertTokenizer.from_file(vocab_dir / "tokenizer.json"),
        "world": World(),
    }
    return lambda **changes: TextStreams(**(values | changes))


@pytest.mark.parametrize(
    ("max_batch_tokens", "num_processes", "rows_per_batch"),
    [(1024, 1, 12), (1024, 2, 6), (95, 1, 6), (96, 1, 12), (47, 2, 3), (40, 1, 4), (1, 1, 1)],
)
def test_micro_batches_are_the_largest_that_fit_and_divide_a_step(
    max_batch_tokens: int, num_processes: int, rows_per_batch: int, text_streams: Any
) -> None:
    world = World(size=num_processes)
    slicing = text_streams(max_batch_tokens=max_batch_tokens, world=world).masked().slicing
    assert slicing.rows_per_batch == rows_per_batch


def test_a_step_has_pairs_of_about_as_many_tokens_as_masked_rows(text_streams: Any) -> None:
    options = {"max_positions": 512, "short_rate": 0.1, "min_sentences": 1}
    for length, num_processes, num_rows in ((4, 1, 12), (16, 1, 3), (16, 2, 2), (512, 2, 2)):
        streams = text_streams(world=World(size=num_processes))
        assert streams.pairs(length=length, **options).slicing.num_rows == num_rows
    # A row of pairs has both orders, so it has 2 * 4 tokens.
    pairs = text_streams(max_batch_tokens=32).pairs(length=4, **options)
    assert pairs.slicing.rows_per_batch == 4


def test_rows_divide_among_the_processes(text_streams: Any) -> None:
    message = r"^--batch-size 12 is not a multiple of the number of processes \(5\)\."
    with pytest.raises(RunError, match=message):
        text_streams(world=World(size=5)).masked()
