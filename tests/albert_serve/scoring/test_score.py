"""Batch scoring: every row its result, in order, whatever the other rows are."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import stat
import threading
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from albert_serve.api.embeddings import FeatureExtractionParameters
from albert_serve.api.schemas import FillMaskParameters, TextClassificationParameters
from albert_serve.errors import EngineError, InvalidInputError, NotFoundError
from albert_serve.scoring.job import score_files
from albert_serve.scoring.local import LocalScorer
from albert_serve.scoring.options import ScoreOptions, ScoreSummary
from albert_serve.tasks import EncoderInput, Logits, TaskSetup, open_task
from albert_serve.tasks.base import Runner
from tests.albert_serve.task_fixtures import Answerer, TorchEngine


class Watched(TorchEngine):
    """Notes the batches, and fails on any that holds the poisonous token."""

    def __init__(self, engine: TorchEngine, poison: int | None = None) -> None:
        super().__init__(engine.model, engine.max_batch_tokens)
        self.poison = poison
        self.batches: list[list[int]] = []

    def run(self, inputs: Sequence[EncoderInput]) -> list[Logits]:
        self.batches.append([len(item.ids) for item in inputs])
        if any(self.poison in item.ids for item in inputs):
            raise EngineError("poison")
        return super().run(inputs)


def score_file(
    engine: Runner,
    task: str,
    setup: TaskSetup,
    source: Path,
    output: Path,
    *,
    parameters: dict[str, Any] | None = None,
    part_rows: int = 512,
    dedupe: bool = True,
) -> ScoreSummary:
    """Scores one file, and keeps the ids of its rows."""
    options = ScoreOptions(
        parameters=parameters or {}, keep=["id"], part_rows=part_rows, dedupe=dedupe
    )
    return score_files(LocalScorer(engine, task, setup), [source], output, options)


def write(file: Path, rows: Sequence[object]) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    file.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return file


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def score(
    engine: TorchEngine, task_setup: TaskSetup, tmp_path: Path
) -> Callable[..., list[dict[str, Any]]]:
    """Scores rows of a task, and gives the results."""

    def run(task: str, rows: Sequence[object], **parameters: Any) -> list[dict[str, Any]]:
        source, output = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
        score_file(engine, task, task_setup, source, output, parameters=parameters)
        return read(output)

    return run


Score = Callable[..., list[dict[str, Any]]]


def test_rows_keep_their_order_and_their_ids(
    score: Score, answer: Answerer, task_setup: TaskSetup, sentences: list[str]
) -> None:
    rows = [{"id": f"n{i}", "text": text, "rating": 3} for i, text in enumerate(sentences)]
    results = score("text-classification", rows)
    task = open_task("text-classification", task_setup)
    expected = [answer(task.prepare(text, TextClassificationParameters())) for text in sentences]
    assert results == [
        {"id": row["id"], "output": [label.model_dump() for label in labels]}
        for row, labels in zip(rows, expected, strict=True)
    ]


@pytest.mark.parametrize(
    ("task", "item", "fields"),
    [
        ("fill-mask", {"text": "a [MASK]"}, {"score", "token", "token_str", "sequence"}),
        ("text-classification", {"text": "a", "text_pair": "b"}, {"label", "score"}),
        ("question-answering", {"question": "q", "context": "c"}, {"answer", "score"}),
        ("sentence-order", {"text": "a", "text_pair": "b"}, {"in_order"}),
    ],
)
def test_bare_fields_and_inputs_are_the_same(
    task: str, item: dict[str, str], fields: set[str], score: Score
) -> None:
    inputs: Any = item["text"] if list(item) == ["text"] else item
    bare, one, several = score(task, [item, {"inputs": inputs}, {"inputs": [inputs, inputs]}])
    assert bare == one
    assert several["output"] == [one["output"]] * 2
    best = one["output"][0] if isinstance(one["output"], list) else one["output"]
    assert set(best) >= fields


def test_embeddings_are_scored(score: Score, answer: Answerer, task_setup: TaskSetup) -> None:
    texts = ["It rained.", "We stayed in."]
    rows: list[Any] = [{"id": 7, "text": texts[0]}, {"inputs": texts}, {"text": "run " * 300}]
    one, several, refused = score("feature-extraction", rows, normalize=True)
    task = open_task("feature-extraction", task_setup)
    parameters = FeatureExtractionParameters(normalize=True)
    expected = [answer(task.prepare(text, parameters)) for text in texts]
    assert one == {"id": 7, "output": expected[0]}
    assert several["output"] == expected
    assert refused["error_type"] == "too_long"


def test_parts_of_token_vectors_are_smaller(
    engine: TorchEngine, task_setup: TaskSetup, tmp_path: Path
) -> None:
    source = write(tmp_path / "in.jsonl", [{"text": "run " * 100}] * 200)
    num_parts = [
        score_file(
            engine,
            "feature-extraction",
            task_setup,
            source,
            tmp_path / f"{pooling}.jsonl",
            parameters={"pooling": pooling},
        ).num_parts
        for pooling in ("mean", "none")
    ]
    assert num_parts == [1, 2]


def test_sentences_are_scored_bare_or_as_inputs(score: Score) -> None:
    sentences = ["It rained.", "We stayed in.", "We played cards."]
    bare, one, pair = score(
        "sentence-order",
        [
            {"sentences": sentences},
            {"inputs": {"sentences": sentences}},
            {"text": "It rained.", "text_pair": "We stayed in."},
        ],
    )
    assert bare == one
    assert set(bare["output"]) == {"pairs", "coherence"}
    assert pair["output"]["in_order"] == pytest.approx(bare["output"]["pairs"][0]["in_order"])
    [both] = score("sentence-order", [{"text": "a", "text_pair": "b", "sentences": sentences}])
    assert both["error_type"] == "invalid_input"


def test_lists_of_a_csv_are_json(
    engine: TorchEngine, task_setup: TaskSetup, tmp_path: Path
) -> None:
    source, output = tmp_path / "in.csv", tmp_path / "out.jsonl"
    source.write_text('id,sentences\n1,"[""It rained."", ""We stayed in.""]"\n2,It rained.\n')
    score_file(engine, "sentence-order", task_setup, source, output)
    scored, refused = read(output)
    assert set(scored["output"]) == {"pairs", "coherence"}
    assert refused["error"].startswith('sentences is not a JSON list such as ["a", "b"]: ')


def test_items_of_several_rounds_score_as_they_do_alone(
    score: Score, answer: Answerer, task_setup: TaskSetup
) -> None:
    texts = ["The [MASK] was [MASK] .", "a [MASK]", "[MASK] [MASK] [MASK] and a [MASK]"] * 3
    results = score("fill-mask", [{"text": text} for text in texts], joint=True, top_k=2)
    task = open_task("fill-mask", task_setup)
    parameters = FillMaskParameters(joint=True, top_k=2)
    expected = [answer(task.prepare(text, parameters)) for text in texts]
    assert [row["output"] for row in results] == [
        [filled.model_dump() for filled in answers] for answers in expected
    ]


def test_a_row_that_breaks_the_engine_in_a_later_round_fails_alone(
    engine: TorchEngine, task_setup: TaskSetup, tmp_path: Path
) -> None:
    poison = task_setup.tokenizer.token_id("€")

    class Faltering(TorchEngine):
        """Fails at the poison once one of the two masks beside it has been filled."""

        def run(self, inputs: Sequence[EncoderInput]) -> list[Logits]:
            if any(poison in item.ids and len(item.rows or []) == 1 for item in inputs):
                raise EngineError("faltered")
            return super().run(inputs)

    rows = [{"inputs": ["[MASK] € [MASK]", "a [MASK]"]}, {"inputs": "[MASK] [MASK]"}]
    source, output = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    faltering, joint = Faltering(engine.model), {"joint": True}
    score_file(faltering, "fill-mask", task_setup, source, output, parameters=joint)
    assert ["error" in row for row in read(output)] == [True, False]


def test_a_bad_row_fails_alone(score: Score) -> None:
    results = score(
        "fill-mask",
        [
            {"text": "a [MASK]"},
            "{not json",
            "",
            "[1]",
            "NaN",
            '{"id": 1e400, "text": "a [MASK]"}',
            {"id": 7, "text": "no mask"},
            {"id": None, "other": 1},
            {"text": 5},
            {"text": "a [MASK]", "parameters": {"top_k": 0}},
            {"inputs": ["a [MASK]", "none"]},
            {"id": "\ud800", "text": "\ud800 [MASK]"},
            {"text": "word " * 300 + "[MASK]"},
            {"text": "b [MASK]"},
        ],
    )
    assert [row.get("error_type", "fine") for row in results] == [
        "fine",
        *["malformed"] * 4,
        "no_mask",
        *["invalid_input"] * 3,
        "no_mask",
        "invalid_input",
        "too_long",
        "fine",
    ]
    assert results[1]["error"].startswith("line 2 is not JSON")
    assert results[2]["error"] == "line 4 is not a JSON object"
    assert results[5]["id"] == 7
    assert results[6]["error"] == "the row has neither inputs nor text"
    assert results[9]["error"].startswith("inputs[1]: ")
    assert results[10]["id"] == "\ud800"


def test_a_row_that_breaks_the_engine_fails_alone(
    engine: TorchEngine, task_setup: TaskSetup, tmp_path: Path
) -> None:
    watched = Watched(engine, poison=task_setup.tokenizer.token_id("€"))
    rows = [{"id": i, "text": "a €" if i == 5 else f"text {i}"} for i in range(20)]
    source, output = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    summary = score_file(watched, "text-classification", task_setup, source, output)
    results = read(output)
    assert [row["id"] for row in results] == list(range(20))
    assert [row["id"] for row in results if "error" in row] == [5]
    assert results[5] == {"id": 5, "error": "poison", "error_type": "engine"}
    assert (summary.num_rows, summary.num_errors) == (20, 1)
    assert str(summary).startswith("20 rows, 1 with errors, in ")


def test_rows_of_like_lengths_run_together_within_the_budget(
    engine: TorchEngine, task_setup: TaskSetup, tmp_path: Path
) -> None:
    watched = Watched(engine)
    rows = [{"text": "word " * (1 + (i * 37) % 100)} for i in range(60)]
    source = write(tmp_path / "in.jsonl", rows)
    parameters = {"truncation": "truncate"}
    score_file(
        watched, "text-classification", task_setup, source, tmp_path / "out", parameters=parameters
    )
    assert sum(map(len, watched.batches)) == 60
    assert all(len(batch) * max(batch) <= 8 * 512 for batch in watched.batches)
    in_order = [length for batch in watched.batches for length in batch]
    assert in_order == sorted(in_order, reverse=True)
    assert len(watched.batches) < 30


def test_parameters_of_the_row_come_before_those_of_the_job(score: Score) -> None:
    rows = [{"text": "a [MASK]"}, {"text": "a [MASK]", "parameters": {"top_k": 3}}]
    assert [len(row["output"]) for row in score("fill-mask", rows, top_k=2)] == [2, 3]


def test_truncation_and_replacements_are_reported(score: Score) -> None:
    [cut, replaced] = score(
        "fill-mask",
        [
            {"text": "[MASK] " + "word " * 300, "parameters": {"truncation": True}},
            {"text": "a [MASK]", "parameters": {"targets": "supervolcanoes"}},
        ],
    )
    assert cut["truncated_tokens"] > 0
    assert 0 < cut["truncated_at"]["inputs"] < 5 * 300
    assert "its first piece" in replaced["warnings"][0]


@pytest.mark.parametrize("compress", [gzip.compress, lzma.compress, bz2.compress])
def test_a_damaged_input_ends_the_job_and_leaves_no_output(
    compress: Any, engine: TorchEngine, task_setup: TaskSetup, tmp_path: Path
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(compress(b'{"text": "a [MASK]"}\n' * 9)[:-6])
    output.write_text("the last job's\n")
    with pytest.raises(InvalidInputError, match="damaged or incomplete"):
        score_file(engine, "fill-mask", task_setup, source, output)
    assert output.read_text() == "the last job's\n"


def test_an_invalid_job_is_refused_before_it_begins(
    engine: TorchEngine, task_setup: TaskSetup, tmp_path: Path
) -> None:
    source, output = write(tmp_path / "in.jsonl", [{"text": "a [MASK]"}]), tmp_path / "out.jsonl"
    with pytest.raises(InvalidInputError, match="'topk' is not known"):
        score_file(engine, "fill-mask", task_setup, source, output, parameters={"topk": 1})
    with pytest.raises(NotFoundError, match="there are fill-mask"):
        score_file(engine, "fill-masks", task_setup, source, output)
    with pytest.raises(InvalidInputError, match="also the input"):
        score_file(engine, "fill-mask", task_setup, source, source)
    assert list(tmp_path.iterdir()) == [source]


def test_an_empty_input_gives_an_empty_output(score: Score) -> None:
    assert score("fill-mask", []) == []


Job = Callable[[Path, Path], None]


@pytest.fixture
def job(engine: TorchEngine, task_setup: TaskSetup) -> Job:
    """Scores a file of texts with a mask."""

    def run(source: Path, output: Path) -> None:
        score_file(engine, "fill-mask", task_setup, source, output)

    return run


ROW = {"id": 1, "text": "a [MASK]"}


def test_a_pipe_is_written_to_and_stays_a_pipe(job: Job, tmp_path: Path) -> None:
    source, output = write(tmp_path / "in.jsonl", [ROW]), tmp_path / "pipe"
    os.mkfifo(output)
    arrived: list[str] = []
    reader = threading.Thread(target=lambda: arrived.append(output.read_text()))
    reader.start()
    job(source, output)
    reader.join(timeout=10)
    assert stat.S_ISFIFO(output.lstat().st_mode)
    assert json.loads(arrived[0])["id"] == 1


def test_the_standard_output_is_written_to_wherever_it_goes(job: Job, tmp_path: Path) -> None:
    """As `>> out.jsonl` has it: what was there stays, and what follows comes after."""
    source, redirected = write(tmp_path / "in.jsonl", [ROW]), tmp_path / "out.jsonl"
    redirected.write_text("before\n")
    kept = os.dup(1)
    target = os.open(redirected, os.O_WRONLY | os.O_APPEND)
    try:
        os.dup2(target, 1)
        job(source, Path("/dev/stdout"))
        os.write(1, b"after\n")
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(target)
    before, row, after = redirected.read_text().splitlines()
    assert (before, json.loads(row)["id"], after) == ("before", 1, "after")


def test_the_file_behind_a_link_is_replaced(job: Job, tmp_path: Path) -> None:
    output, linked = tmp_path / "out.jsonl", tmp_path / "elsewhere.jsonl"
    linked.write_text("old")
    output.symlink_to(linked)
    job(write(tmp_path / "in.jsonl", [ROW]), output)
    assert output.is_symlink()
    assert read(linked)[0]["id"] == 1


@pytest.mark.parametrize("end", [b"", b'\n{"id": 1, "text": "a [MASK]"}\n'])
def test_a_line_without_end_is_a_rows_error(
    end: bytes, engine: TorchEngine, task_setup: TaskSetup, tmp_path: Path
) -> None:
    source, output = tmp_path / "in.jsonl.gz", tmp_path / "out.jsonl"
    with gzip.open(source, "wb", compresslevel=1) as stream:
        for _ in range(100):
            stream.write(b" " * (1 << 20))
        stream.write(b"a" + end)
    tracemalloc.start()
    try:
        summary = score_file(engine, "fill-mask", task_setup, source, output)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    first, *others = read(output)
    assert first["error"].startswith("line 1 has more than 16777216 bytes")
    assert first["error_type"] == "body_too_large"
    assert [row["id"] for row in others] == [1] * bool(end)
    assert summary.num_errors == 1
    assert peak < 60 << 20


@pytest.mark.parametrize("name", ["in.xlsx", "in.jsonl"])
def test_a_format_that_is_not_read_is_named(name: str, job: Job, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"PK\x03\x04")
    with pytest.raises(InvalidInputError, match="is Excel, or Zip; the input must be jsonl, csv,"):
        job(tmp_path / name, tmp_path / "out.jsonl")
