"""`--embeddings`: vectors learnt from pairs, triplets and scores."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from albert_serve.tokenizer import AlbertTokenizer
from tests.training.support import read_metrics, validations
from training.commands import finetune
from training.data.batch import TokenisedExample
from training.data.collate import collate_examples
from training.model.checkpoint import load_checkpoint
from training.tasks.embeddings.loss import sentence_vectors

Capture = pytest.CaptureFixture[str]
THINGS = ("The game", "A city", "His music", "Her work", "Their school")
SAME = (("was good.", "was great."), ("was lost in the war.", "died in the war."))
PAIRS = [(f"{thing} {one}", f"{thing} {other}") for thing in THINGS for one, other in SAME]
TRIPLETS = [
    (*pair, negative) for pair, (_, negative) in zip(PAIRS, PAIRS[2:] + PAIRS[:2], strict=True)
]
SCORED = [
    (first, second, str(5.0 * (pair == other)))
    for (pair, (first, _)), (other, (_, second)) in product(enumerate(PAIRS), repeat=2)
]
DATA: dict[str, tuple[str, Sequence[tuple[str, ...]]]] = {
    "pairs": ("anchor\tpositive", PAIRS),
    "triplets": ("anchor\tpositive\tnegative", TRIPLETS),
    "scores": ("sentence1\tsentence2\tscore", SCORED),
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with a file of each kind of texts, and files that cannot be learnt."""
    for name, (header, rows) in DATA.items():
        lines = [header, *("\t".join(row) for row in rows)]
        (tmp_path / f"{name}.tsv").write_text("\n".join(lines))
    (tmp_path / "texts.tsv").write_text("text\nA city\nHis music")
    (tmp_path / "unlike.tsv").write_text("sentence1\tsentence2\tscore\nA city\tHis music\tvery")
    return tmp_path


def losses(run: Path) -> list[float]:
    return [each["embeddings/loss"] for each in read_metrics(run) if "embeddings/loss" in each]


@pytest.mark.parametrize("name", ["pairs", "triplets", "scores"])
def test_vectors_are_learnt_from_examples(
    name: str, data: Path, start: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    options = [*start, "--embeddings", str(data / f"{name}.tsv")]
    held_out = ["--validation", str(data / "scores.tsv"), "--validate-every", "10"]
    size = ["--batch-size", "10", "--steps", "40", "--lr", "3e-3"]
    assert finetune.main([*options, *held_out, *size, "--output", str(run)]) == 0
    first, *_, last = losses(run)
    assert last < first
    # The highest possible is 0.52: a tenth of the pairs have the one score, the rest the other.
    assert max(validations(run, "embeddings", "spearman").values()) > 0.4


def test_examples_that_are_compared_fit_into_a_micro_batch(
    start: list[str], data: Path, tmp_path: Path, capsys: Capture
) -> None:
    options = [*start, "--embeddings", str(data / "pairs.tsv"), "--output", str(tmp_path / "run")]
    options += ["--batch-size", "8", "--length", "32", "--steps", "1"]
    assert finetune.main([*options, "--micro-batch-size", "2"]) == 1
    assert "Use --batch-size 2, or a shorter --length" in capsys.readouterr().err
    assert finetune.main([*options, "--micro-batch-size", "8"]) == 0


def test_a_vector_is_the_normalised_mean_of_all_tokens(pretrained: Path) -> None:
    folder = pretrained / "checkpoint"
    tokenizer = AlbertTokenizer.from_file(folder / "tokenizer.json")
    encodings = [tokenizer.encode(text) for text in (PAIRS[0][0], PAIRS[3][1], "A city")]
    examples = [TokenisedExample(ids=each.ids, types=each.types, target=0) for each in encodings]
    batch = collate_examples("embeddings", examples, row_length=32)
    model: Any = transformers.AlbertModel.from_pretrained(folder)
    with torch.no_grad():
        vectors_CH = sentence_vectors(load_checkpoint(folder).eval(), batch)
        for vector_H, each in zip(vectors_CH, encodings, strict=True):
            states_SH = model(input_ids=torch.tensor([each.ids])).last_hidden_state[0]
            expected_H = torch.nn.functional.normalize(states_SH.mean(0), dim=-1)
            torch.testing.assert_close(vector_H, expected_H, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["texts.tsv"], "no default columns of texts. Its columns are text"),
        (["pairs.tsv", "--embedding-columns", "a"], "--embedding-columns a has 1 names. Specify"),
        (["pairs.tsv", "triplets.tsv"], "The files have several kinds of texts"),
        (
            ["pairs.tsv", "--embedding-columns", "a", "b"],
            "no column a or b. Its columns are anchor",
        ),
        (["unlike.tsv"], "line 2: 'very' in column score is not a number"),
    ],
)
def test_what_cannot_be_learnt_is_refused(
    options: list[str], message: str, data: Path, start: list[str], tmp_path: Path, capsys: Capture
) -> None:
    named = [str(data / word) if Path(word).suffix else word for word in options]
    assert finetune.main([*start, "--embeddings", *named, "--output", str(tmp_path / "run")]) == 1
    assert message in capsys.readouterr().err
