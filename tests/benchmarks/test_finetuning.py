"""That both sides are given the same examples, and are compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from albert_serve.tokenizer import AlbertTokenizer
from benchmarks import finetune
from benchmarks.finetuning.data import read_examples, write_examples
from benchmarks.finetuning.hf import Collator, Examples, make_model
from benchmarks.finetuning.jobs import Case, FinetuningTask, Job
from benchmarks.finetuning.ours import build
from benchmarks.harness.errors import BenchmarkError
from benchmarks.pretraining.jobs import KEEPS_MEMORY, HfSettings
from tests.training.conftest import one_thread  # noqa: F401 - a fixture
from tests.training.support import REPOSITORY
from training.data.batch import ExampleBatch

TOKENIZER = REPOSITORY / "models" / "albert-small-en"
FILES: dict[FinetuningTask, Path] = {
    "text-classification": REPOSITORY / "tests/data/banking77/train.csv",
    "question-answering": REPOSITORY / "tests/data/squad.json",
}
LENGTH = 48
BATCH_SIZE = 4


def make_job(
    task: FinetuningTask, folder: Path, hf: HfSettings | None = None, num_examples: int = BATCH_SIZE
) -> Job:
    examples = folder / f"{task}.json"
    write_examples(
        task,
        [FILES[task]],
        AlbertTokenizer.from_file(TOKENIZER / "tokenizer.json"),
        examples,
        length=LENGTH,
        num_examples=num_examples,
    )
    case = Case(task=task, shape="small", vocab_size=12000, length=LENGTH, batch_size=BATCH_SIZE)
    return Job(case=case, hf=hf, examples=examples, device="cpu", num_threads=1, compiles=False)


@pytest.mark.parametrize("task", list(FILES))
@pytest.mark.parametrize("padding", ["full", "grouped"])
def test_both_sides_get_the_same_tokens_and_targets(
    task: FinetuningTask, padding: str, tmp_path: Path
) -> None:
    settings = HfSettings(num_rows=BATCH_SIZE, padding="full" if padding == "full" else "grouped")
    job = make_job(task, tmp_path, settings)
    dataset = Examples(read_examples(job.examples))
    theirs = Collator(job, settings)([dataset[index] for index in range(BATCH_SIZE)])
    [ours] = build(make_job(task, tmp_path)).streams[0].step()
    assert isinstance(ours, ExampleBatch)
    lengths = theirs["attention_mask"].sum(1)
    longest = int(lengths.max())
    size = theirs["input_ids"].shape[1]
    assert size == LENGTH if padding == "full" else longest <= size < longest + 8
    assert int(lengths.sum()) == ours.num_tokens
    rows = [(row[:end].tolist()) for row, end in zip(theirs["input_ids"], lengths, strict=True)]
    flat = ours.tokens.ids.flatten().tolist()
    begins, sizes = ours.firsts.tolist(), ours.sizes.tolist()
    own = [flat[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)]
    assert sorted(rows) == sorted(own)
    names = ("labels",) if "labels" in theirs else ("start_positions", "end_positions")
    targets = torch.stack([theirs[name] for name in names], 1).tolist()
    mine = ours.targets.reshape(BATCH_SIZE, -1).tolist()
    assert sorted(zip(rows, targets, strict=True)) == sorted(zip(own, mine, strict=True))


@pytest.mark.parametrize("task", list(FILES))
def test_both_sides_have_the_same_model(task: FinetuningTask, tmp_path: Path) -> None:
    settings = HfSettings(num_rows=BATCH_SIZE)
    theirs = make_model(make_job(task, tmp_path), settings)
    ours = build(make_job(task, tmp_path)).model
    count = sum(each.numel() for each in theirs.parameters())
    assert sum(each.numel() for each in ours.parameters()) == count


def test_a_job_travels_as_json(tmp_path: Path) -> None:
    hf = HfSettings(num_rows=4, padding="grouped", keeps_memory=True)
    for job in (make_job("question-answering", tmp_path, each) for each in (None, hf)):
        assert Job.from_json(job.to_json()) == job
    assert job.environment.items() >= KEEPS_MEMORY.items()


def test_files_without_examples_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match=r"train\.csv: no examples"):
        make_job("text-classification", tmp_path, num_examples=0)


@pytest.mark.slow
def test_both_sides_train_and_are_compared(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{finetune._BEGIN}\n{finetune._END}\n")
    options = ["--shapes", "small", "--no-compile", "--rounds", "1", "--turn", "1s"]
    where = ["--output", str(tmp_path), "--write", str(page), "--threads", "1"]
    assert finetune.main([*options, *where, "--device", "cpu", "--batch-size", "4"]) == 0
    cases = json.loads((tmp_path / "results.json").read_text())["cases"]
    assert [len(case["results"]) for case in cases] == [3, 3]
    for case in cases:
        for result in case["results"]:
            assert not result["failure"]
            assert result["turns"][0]["num_tokens"] > 0
    assert page.read_text().count("**ours (not compiled)**") == 2
