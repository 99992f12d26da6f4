"""That both sides are given the same text, and that turns are timed as they should be."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from albert_serve.config import PRESETS
from albert_serve.tokenizer import AlbertTokenizer
from benchmarks import pretrain
from benchmarks.harness.channel import Channel
from benchmarks.harness.errors import BenchmarkError
from benchmarks.pretraining.child import Child
from benchmarks.pretraining.data import Arrays, write
from benchmarks.pretraining.hf import Examples, PadTogether
from benchmarks.pretraining.jobs import KEEPS_MEMORY, Case, HfSettings, Job
from benchmarks.pretraining.stopwatch import Stopwatch
from tests.training.support import REPOSITORY, WIKI
from training.data.collate import Collator
from training.data.examples import IGNORED, ExampleSettings
from training.data.masking import NgramMasking, word_starts
from training.data.packing import Plan
from training.data.shards import Shards
from training.prepare import prepare

TOKENIZER = REPOSITORY / "models" / "albert-small-en"
LENGTH = 48
NUM_EXAMPLES = 60


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    return prepare([WIKI], TOKENIZER / "tokenizer.json", tmp_path_factory.mktemp("s") / "shards")


@pytest.fixture(scope="module")
def arrays(shards: Shards, tmp_path_factory: pytest.TempPathFactory) -> Arrays:
    folder = tmp_path_factory.mktemp("arrays")
    return write(shards, TOKENIZER, folder, length=LENGTH, num_examples=NUM_EXAMPLES)


def make_job(folder: Path, hf: HfSettings | None = None) -> Job:
    return Job(
        case=Case(shape="small", vocab_size=12000, length=LENGTH, num_rows=4),
        hf=hf,
        shards=folder / "shards",
        examples=folder / "examples",
        tokenizer=TOKENIZER,
        device="cpu",
        num_threads=1,
        compiles=False,
    )


def test_transformers_gets_the_tokens_masks_and_labels_that_ours_trains_on(
    shards: Shards, arrays: Arrays
) -> None:
    plan = Plan(shards=shards, settings=ExampleSettings(length=LENGTH), seed=0)
    tokenizer = AlbertTokenizer.from_file(TOKENIZER / "tokenizer.json")
    masking = NgramMasking(word_starts=word_starts(tokenizer))
    collate = Collator(shards=shards, masking=masking, length=LENGTH, seed=0)
    examples = [example for row in plan.epoch(0) for example in row][:NUM_EXAMPLES]
    for number, example in enumerate(examples):
        batch, real = collate([[example]]), int(arrays.lengths[number])
        assert batch.num_tokens == real
        np.testing.assert_array_equal(arrays.ids[number], batch.tokens.ids[0])
        np.testing.assert_array_equal(arrays.types[number], batch.tokens.types[0])
        labels = np.full(LENGTH, IGNORED)
        labels[batch.rows[: batch.num_masked]] = batch.targets[: batch.num_masked]
        np.testing.assert_array_equal(arrays.labels[number], labels)
        assert arrays.orders[number] == batch.labels[0]


def test_a_small_corpus_gives_the_requested_number_of_examples(
    shards: Shards, tmp_path: Path
) -> None:
    plan = Plan(shards=shards, settings=ExampleSettings(length=512), seed=0)
    num_in_epoch = sum(len(row) for row in plan.epoch(0))
    arrays = write(shards, TOKENIZER, tmp_path, length=512, num_examples=2 * num_in_epoch + 1)
    assert len(arrays.lengths) == 2 * num_in_epoch + 1
    assert (arrays.lengths > 0).all()


@pytest.mark.parametrize("padding", ["full", "grouped"])
def test_a_batch_holds_all_real_tokens_and_marks_them(arrays: Arrays, padding: str) -> None:
    settings = HfSettings(num_rows=8, padding="full" if padding == "full" else "grouped")
    dataset = Examples(arrays, settings)
    chosen = np.argsort(arrays.lengths, kind="stable")[:8].tolist()
    batch = PadTogether(LENGTH)([dataset[index] for index in chosen])
    longest = int(arrays.lengths[chosen].max())
    size = batch["input_ids"].shape[1]
    assert size == LENGTH if padding == "full" else longest <= size < longest + 8
    np.testing.assert_array_equal(batch["attention_mask"].sum(1), arrays.lengths[chosen])
    np.testing.assert_array_equal(batch["input_ids"], arrays.ids[chosen, :size])
    np.testing.assert_array_equal(batch["labels"], arrays.labels[chosen, :size])
    np.testing.assert_array_equal(batch["sentence_order_label"], arrays.orders[chosen])


def test_a_job_travels_as_json(tmp_path: Path) -> None:
    hf = HfSettings(num_rows=4, attention="eager", padding="grouped", keeps_memory=True)
    for job in (make_job(tmp_path), make_job(tmp_path, hf)):
        assert Job.from_json(job.to_json()) == job
    assert make_job(tmp_path, hf).environment.items() >= KEEPS_MEMORY.items()
    assert not make_job(tmp_path).environment.keys() & KEEPS_MEMORY.keys()


def test_a_case_has_the_sizes_of_its_preset_and_positions_enough() -> None:
    config = Case(shape="small", vocab_size=13000, length=512, num_rows=1).config
    assert (config.hidden_size, config.num_layers) == (256, PRESETS["small"].num_layers)
    assert (config.vocab_size, config.max_positions) == (13000, 512)


class Line(Channel):
    """A line to a parent that gives these turns and keeps the answers."""

    def __init__(self, turns: list[float]) -> None:
        self.turns = turns
        self.answers: list[Mapping[str, Any]] = []

    def receive(self) -> dict[str, Any] | None:
        return {"seconds": self.turns.pop(0)} if self.turns else None

    def send(self, message: Mapping[str, Any]) -> None:
        self.answers.append(message)


def test_a_turn_counts_the_steps_after_the_warm_up_alone() -> None:
    line, num_tokens = Line([0.0, 0.0]), 0
    watch = Stopwatch(line, torch.device("cpu"), lambda: num_tokens)
    goes_on = []
    for step in range(1, 6):
        num_tokens += step
        goes_on.append(watch.step_is_done())
    assert goes_on == [True, True, True, True, False]
    assert [set(answer) == {"warm_up_s"} for answer in line.answers] == [True, False, False]
    assert [answer["num_tokens"] for answer in line.answers[1:]] == [4, 5]
    assert all(answer["num_steps"] == 1 for answer in line.answers[1:])
    assert all(answer["peak_bytes"] > 1 << 20 for answer in line.answers[1:])


def test_a_turn_in_which_something_is_compiled_begins_again() -> None:
    line, num_tokens = Line([0.0]), 0
    watch = Stopwatch(line, torch.device("cpu"), lambda: num_tokens)
    before = counters["stats"]["unique_graphs"]
    try:
        for step in range(1, 6):
            num_tokens += step
            if step == 4:
                counters["stats"]["unique_graphs"] = before + 1
            assert watch.step_is_done() == (step < 5)
    finally:
        counters["stats"]["unique_graphs"] = before
    assert line.answers[1]["num_tokens"] == 5


def test_a_child_that_fails_says_why(tmp_path: Path) -> None:
    with (
        pytest.raises(BenchmarkError, match=r"ours ended with status 1: .*ShardError"),
        Child(make_job(tmp_path), tmp_path / "log"),
    ):
        pass


@pytest.mark.parametrize("case", ["base", "tiny@128", "base@", "base@128x", "base@128@2"])
def test_an_unknown_case_is_refused(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pretrain.main(["--cases", case, "--output", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "SHAPE@LENGTH" in error
    assert error.count("\n") == 1


@pytest.mark.slow
def test_both_sides_train_and_are_compared(tmp_path: Path) -> None:
    options = ["--cases", "small@32x4", "--no-compile", "--rounds", "1", "--turn", "1s"]
    against = ["--against", "sdpa", "eager-kept", "--hf-batch-tokens", "128"]
    assert pretrain.main([*options, *against, "--threads", "1", "--output", str(tmp_path)]) == 0
    (case,) = json.loads((tmp_path / "results.json").read_text())["cases"]
    assert len(case["results"]) == 3
    for result in case["results"]:
        assert not result["failure"]
        (turn,) = result["turns"]
        assert turn["num_tokens"] > 0
        assert turn["seconds"] >= 1
    table = (tmp_path / "tables.md").read_text()
    assert "**ours**" in table
    assert "transformers (4 rows, eager" in table
