"""Batch scoring: every row its result, in order, whatever the other rows are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from albert_serve.api.schemas import TextClassificationParameters
from albert_serve.errors import EngineError
from albert_serve.scoring.job import score_files
from albert_serve.scoring.local import LocalScorer
from albert_serve.scoring.options import ScoreOptions
from albert_serve.tasks import EncoderInput, Logits, TaskSetup, open_task
from albert_serve.tasks.base import Runner
from tests.albert_serve.scoring.jobs import read_jsonl, write_jsonl
from tests.albert_serve.support import Answerer, TorchEngine


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


Score = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def score(engine: TorchEngine, task_setup: TaskSetup, tmp_path: Path) -> Score:
    """Scores rows of a task, keeps their ids, and gives the results."""

    def run(
        task: str, rows: Sequence[object], runner: Runner = engine, **parameters: Any
    ) -> list[dict[str, Any]]:
        source, output = write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
        options = ScoreOptions(parameters=parameters, keep=["id"])
        score_files(LocalScorer(runner, task, task_setup), [source], output, options)
        return read_jsonl(output)

    return run


def test_rows_keep_their_order_and_their_ids(
    score: Score, answer: Answerer, task_setup: TaskSetup, sentences: list[str]
) -> None:
    rows = [{"id": f"n{i}", "text": text, "rating": 3} for i, text in enumerate(sentences)]
    results = score("text-classification", rows, top_k=None)
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
        ("sentence-order", {"sentences": ["a", "b", "c"]}, {"pairs", "coherence"}),
    ],
)
def test_bare_fields_and_inputs_are_the_same(
    task: str, item: dict[str, Any], fields: set[str], score: Score
) -> None:
    inputs: Any = item["text"] if list(item) == ["text"] else item
    bare, one, several = score(task, [item, {"inputs": inputs}, {"inputs": [inputs, inputs]}])
    assert bare == one
    assert several["output"] == [one["output"]] * 2
    best = one["output"][0] if isinstance(one["output"], list) else one["output"]
    assert set(best) >= fields


def trained(task: str, length: int) -> dict[str, Any]:
    """A manifest's part about training."""
    settings = {"length": length, "embeddings": "True" if task == "feature-extraction" else None}
    return {"stages": [{"tasks": [task], "settings": settings}]}


LONG = "run " * 40


@pytest.mark.parametrize("task", ["text-classification", "feature-extraction"])
def test_long_texts_are_truncated_to_the_length_of_training(
    task: str, engine: TorchEngine, task_setup: TaskSetup, tmp_path: Path
) -> None:
    scorer = LocalScorer(engine, task, task_setup, training=trained(task, 16))
    name = "truncate" if task == "feature-extraction" else "truncation"
    rows: list[object] = [{"text": text} for text in ("run", LONG, "run " * 14, "run " * 15)]
    rows += [{"text": LONG, "parameters": {name: False}}]
    source, output = write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    summary = score_files(scorer, [source], output)
    assert [row.get("truncated_tokens") for row in read_jsonl(output)] == [None, 26, None, 1, None]
    truncated, omitted = summary.long_texts()
    assert truncated.startswith("2 of 5 texts were truncated to 16 tokens (--no-truncation ")
    assert omitted.startswith("1 of 5 texts were omitted, because they have more than 16 tokens (")
    strict = score_files(scorer, [source], output, ScoreOptions(truncation=False))
    assert (strict.num_truncated, strict.errors_by_type) == (0, {"too_long": 3})
    assert read_jsonl(output)[1]["error_type"] == "too_long"


def test_vectors_of_tokens_and_of_untrained_tasks_have_all_positions(
    score: Score, engine: TorchEngine, task_setup: TaskSetup
) -> None:
    training = trained("feature-extraction", 16)
    scorer = LocalScorer(engine, "feature-extraction", task_setup, training=training)
    positions = task_setup.max_positions
    assert scorer.text_length({"pooling": "none"}) == positions
    assert scorer.text_length({}) == 16
    for task in ("text-classification", "fill-mask"):
        scorer = LocalScorer(engine, task, task_setup, training=training)
        assert scorer.text_length({}) == positions
    answerer = LocalScorer(engine, "question-answering", task_setup)
    assert answerer.text_length({}) == min(positions, 384) // 2
    assert answerer.text_length({"max_seq_len": 60}) == 30
    assert answerer.text_length({"max_seq_len": 60, "truncation": False}) == 56


def test_parts_of_token_vectors_are_smaller(
    engine: TorchEngine, task_setup: TaskSetup, tmp_path: Path
) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": "run " * 100}] * 200)
    scorer = LocalScorer(engine, "feature-extraction", task_setup)
    for pooling, num_parts in (("mean", 1), ("none", 2)):
        options = ScoreOptions(parameters={"pooling": pooling}, keep=[])
        summary = score_files(scorer, [source], tmp_path / pooling, options)
        assert summary.num_parts == num_parts


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
            {"text": "[MASK] " + "word " * 300, "parameters": {"truncation": False}},
            {"text": ""},
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
        "no_mask",
        "fine",
    ]
    assert results[1]["error"].startswith("line 2 is not JSON")
    assert results[2]["error"] == "line 4 is not a JSON object"
    assert results[5]["id"] == 7
    assert results[6]["error"] == "the row has neither inputs nor text"
    assert results[9]["error"].startswith("inputs[1]: ")
    assert results[10]["id"] == "\N{REPLACEMENT CHARACTER}"


def test_a_row_that_breaks_the_engine_fails_alone(
    score: Score, engine: TorchEngine, task_setup: TaskSetup
) -> None:
    watched = Watched(engine, poison=task_setup.tokenizer.token_id("€"))
    rows = [{"id": i, "text": "a €" if i == 5 else f"text {i}"} for i in range(20)]
    results = score("text-classification", rows, watched)
    assert [row["id"] for row in results] == list(range(20))
    assert [row["id"] for row in results if "error" in row] == [5]
    assert results[5] == {"id": 5, "error": "poison", "error_type": "engine"}


def test_rows_of_like_lengths_run_together_within_the_budget(
    score: Score, engine: TorchEngine
) -> None:
    watched = Watched(engine)
    rows = [{"text": "word " * (1 + (i * 37) % 100)} for i in range(60)]
    score("text-classification", rows, watched, truncation="truncate")
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
    assert "its first piece" in replaced["warnings"][0]
