"""Parts that are computed in parallel are those that are computed one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from albert_serve.api.schemas import TaskRequest
from albert_serve.errors import InvalidInputError
from albert_serve.scoring.answers import OUTPUT, Result
from albert_serve.scoring.dataset import score_dataset
from albert_serve.scoring.errors import StoppedError, TooManyErrorsError
from albert_serve.scoring.job import score_files
from albert_serve.scoring.options import ScoreOptions
from tests.albert_serve.scoring.jobs import HashScorer, text_of, texts, write_csv, write_jsonl


class LengthScorer(HashScorer):
    """Its answers also tell with how many others they were computed; long texts have long ones."""

    def cost_bytes(self, work: TaskRequest) -> int:
        return 1 << 22 if "large" in text_of(work) else 0

    def run(self, works: Sequence[TaskRequest]) -> list[Result]:
        return [self._with_batch(result, works) for result in super().run(works)]

    def _with_batch(self, result: Result, works: Sequence[TaskRequest]) -> Result:
        if result.is_error:
            return result
        labels: list[Any] = result.values[OUTPUT]
        padding = [{"label": "", "score": 0.0}] * (3000 if "long" in text_of(works[0]) else 0)
        batch = [{"label": "batch", "score": len(works)}]
        return Result(values={OUTPUT: [*labels, *batch, *padding]}, num_tokens=result.num_tokens)


class AheadScorer(LengthScorer):
    """Computes several parts at once."""

    num_ahead = 4

    def __init__(self) -> None:
        super().__init__()
        self.pool = ThreadPoolExecutor(3)
        self.num_starts = 0

    def start(self, works: Sequence[TaskRequest]) -> Callable[[], list[Result]]:
        self.num_starts += 1
        return self.pool.submit(self.run, works).result


@pytest.fixture
def ahead() -> Iterator[AheadScorer]:
    scorer = AheadScorer()
    with scorer.pool:
        yield scorer


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name[0] != "."}


def assert_same(
    source: Path, tmp_path: Path, ahead: AheadScorer, suffix: str = "jsonl", **options: Any
) -> None:
    chosen = ScoreOptions(part_rows=10, output_format=suffix, **options)  # type: ignore[arg-type]
    local = score_files(LengthScorer(), [source], f"{tmp_path}/local/", chosen)
    parallel = score_files(ahead, [source], f"{tmp_path}/ahead/", chosen)
    assert parallel.counts == local.counts
    assert parallel.num_run_tokens == local.num_run_tokens
    assert content(tmp_path / "ahead") == content(tmp_path / "local")


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize("dedupe", [True, False])
def test_rows_with_duplicates_and_errors(
    suffix: str, dedupe: bool, tmp_path: Path, ahead: AheadScorer
) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", texts(200))
    assert_same(source, tmp_path, ahead, suffix, dedupe=dedupe)
    assert ahead.num_starts == 20


@pytest.mark.parametrize("text", ["broken", "long"])
def test_answers_that_are_not_stored_are_computed_again(
    text: str, tmp_path: Path, ahead: AheadScorer
) -> None:
    rows = [{"id": i, "text": text if i % 7 == 0 else f"{text} {i % 33}"} for i in range(200)]
    assert_same(write_jsonl(tmp_path / "in.jsonl", rows), tmp_path, ahead)
    # Begun again only until it is known that they are not stored.
    assert 20 < ahead.num_starts <= 20 + 2 * ahead.num_ahead


def test_what_is_stored_can_change_during_a_job(tmp_path: Path, ahead: AheadScorer) -> None:
    names = ["long", "short"]
    rows = [{"id": i, "text": f"{names[i // 20 % 2]} {i // 20} {i % 9}"} for i in range(200)]
    assert_same(write_jsonl(tmp_path / "in.jsonl", rows), tmp_path, ahead)


def test_a_change_of_what_is_stored_is_soon_foreseen(tmp_path: Path, ahead: AheadScorer) -> None:
    def name(number: int) -> str:  # each twice, in neighbouring parts
        return f"{'short' if number < 400 else 'long'} {number // 20 * 10 + number % 10}"

    rows = [{"id": i, "text": name(i)} for i in range(800)]
    assert_same(write_jsonl(tmp_path / "in.jsonl", rows), tmp_path, ahead)
    assert 80 < ahead.num_starts <= 80 + 2 * ahead.num_ahead


def test_large_answers_make_smaller_parts(tmp_path: Path, ahead: AheadScorer) -> None:
    rows = [{"id": i, "text": f"large {i % 90}"} for i in range(200)]
    chosen = ScoreOptions(part_rows=100)
    score_files(
        LengthScorer(), [write_jsonl(tmp_path / "in.jsonl", rows)], f"{tmp_path}/a/", chosen
    )
    score_files(ahead, [tmp_path / "in.jsonl"], f"{tmp_path}/b/", chosen)
    assert content(tmp_path / "a") == content(tmp_path / "b")
    assert len(list((tmp_path / "a").glob("part-*"))) > 2


def test_parts_at_once_are_bounded_by_the_bytes_of_their_answers(
    tmp_path: Path, ahead: AheadScorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "cost_bytes", lambda work: 1 << 28)  # a part of its own
    ahead.num_ahead = 100
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": f"text {i}"} for i in range(12)])
    started: list[int] = []

    def is_stopped() -> bool:
        started.append(ahead.num_starts)
        return False

    score_files(ahead, [source], tmp_path / "out.csv", is_stopped=is_stopped)
    # 1 GiB at once, and what has been written.
    assert started == [4, 5, 6, 7, 8, 9, 10, 11, 12, 12, 12, 12]


def test_a_table_in_memory_is_answered_ahead_too(ahead: AheadScorer) -> None:
    rows = texts(100)
    options = ScoreOptions(part_rows=10)
    assert list(score_dataset(rows, ahead, options)) == list(
        score_dataset(rows, LengthScorer(), options)
    )
    assert ahead.num_starts == 10
    with pytest.raises(TooManyErrorsError, match="3 rows are in error; 2 are allowed"):
        list(score_dataset(texts(200), ahead, ScoreOptions(part_rows=10, max_errors=2)))


def test_a_job_goes_on_with_either(tmp_path: Path, ahead: AheadScorer) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", texts(200))
    options = ScoreOptions(part_rows=10)
    whole = tmp_path / "whole.csv"
    score_files(LengthScorer(), [source], whole, options)
    output = tmp_path / "out.csv"
    ends: list[int] = []

    def is_stopped() -> bool:
        ends.append(0)
        return len(ends) % 7 == 0

    for scorer in (ahead, LengthScorer()):
        with pytest.raises(StoppedError):
            score_files(scorer, [source], output, options, is_stopped=is_stopped)
    summary = score_files(ahead, [source], output, options)
    assert summary.num_resumed_rows == 140
    assert output.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("every", [7, 100])
def test_the_parts_before_a_damaged_row_are_written(
    every: int, tmp_path: Path, ahead: AheadScorer
) -> None:
    # With duplicates whose answers are not stored, parts begin again after the row was met.
    rows = [{"id": i, "text": f"text {i}" if i % every else "long"} for i in range(35)]
    source = write_csv(tmp_path / "in.csv", rows)
    with source.open("a") as stream:
        stream.write('35,"text" 35\n')
    for scorer, name in ((LengthScorer(), "local"), (ahead, "ahead")):
        with pytest.raises(InvalidInputError, match="line 37"):
            score_files(scorer, [source], f"{tmp_path}/{name}/", ScoreOptions(part_rows=10))
    assert len(list((tmp_path / "ahead").glob("part-*"))) == 3
    local, parallel = content(tmp_path / "local"), content(tmp_path / "ahead")
    assert set(local) == set(parallel)
    assert all(local[name] == parallel[name] for name in local if name != "_answers.db")


def test_too_many_errors_end_the_job(tmp_path: Path, ahead: AheadScorer) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", texts(200))
    options = ScoreOptions(part_rows=10, max_errors=2)
    messages = []
    for scorer in (LengthScorer(), ahead):
        with pytest.raises(TooManyErrorsError) as error:
            score_files(scorer, [source], tmp_path / "out.jsonl", options)
        messages.append(str(error.value))
    assert messages[0] == messages[1]
