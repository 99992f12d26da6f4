"""`compat` against what the pipeline of transformers 4.57.6 answered: `oracle_4_57.py` asked it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from albert_serve.api.schemas import Answer, QuestionAnsweringParameters, QuestionContext
from albert_serve.errors import EngineError, InvalidInputError
from albert_serve.tasks import QuestionAnswering
from albert_serve.tokenizer import AlbertTokenizer
from tests.albert_serve.oracle_4_57 import (
    CONTEXTS,
    MAX_POSITIONS,
    PARAMETERS,
    QUESTIONS,
    write_checkpoint,
)
from tests.albert_serve.task_fixtures import TorchEngine
from training.model.checkpoint import load_checkpoint

RECORDED = Path(__file__).resolve().parents[2] / "data/answers-4.57.6.json"
CASES: list[dict[str, Any]] = json.loads(RECORDED.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def compat(tmp_path_factory: pytest.TempPathFactory) -> tuple[QuestionAnswering, TorchEngine]:
    folder = tmp_path_factory.mktemp("old")
    write_checkpoint(folder)
    tokenizer = AlbertTokenizer.from_file(folder / "tokenizer.json")
    task = QuestionAnswering(tokenizer=tokenizer, max_positions=MAX_POSITIONS)
    return task, TorchEngine(load_checkpoint(folder))


def ask(question: str, context: str) -> QuestionContext:
    return QuestionContext(question=QUESTIONS[question], context=CONTEXTS[context])


def answer(
    compat: tuple[QuestionAnswering, TorchEngine], item: QuestionContext, **parameters: Any
) -> Any:
    task, engine = compat
    prepared = task.prepare(item, QuestionAnsweringParameters(compat=True, **parameters))
    return prepared.finish(engine.run(prepared.inputs))


def places(result: list[Answer]) -> list[tuple[int, int]]:
    return [(one.start, one.end) for one in result]


def test_every_case_is_recorded() -> None:
    recorded = [(case["question"], case["context"], case["parameters"]) for case in CASES]
    assert recorded == [
        (question, context, parameters)
        for question in QUESTIONS
        for context in CONTEXTS
        for parameters in PARAMETERS
    ]


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: "-".join(map(str, [case["question"], case["context"]]))
)
def test_answers_are_those_of_4_57_6(
    case: dict[str, Any], compat: tuple[QuestionAnswering, TorchEngine]
) -> None:
    item = ask(case["question"], case["context"])
    result = answer(compat, item, **case["parameters"])
    expected = case["answer"]
    is_single = not isinstance(expected[0], list)
    answers = result if isinstance(result, list) else [result]
    recorded = [expected] if is_single else expected
    # Which of the spans of score 0 are chosen, NumPy's version and the processor decide.
    likely = [one for one in answers if one.score > 0]
    spans = [(start, end) for start, end, score in recorded if score > 0]
    assert places(likely) == spans
    assert [one.score for one in likely] == pytest.approx(
        [score for *_, score in recorded if score > 0], 1e-4
    )
    if len(likely) == len(answers) and len(spans) == len(recorded):
        assert isinstance(result, list) != is_single
    assert all(one.answer == item.context[one.start : one.end] for one in answers)


def test_the_cases_cover_the_pipelines_peculiarities() -> None:
    """Were none of them about it, the test above would say little."""
    over_one = [case for case in CASES if case["context"] == "same" and first_score(case) > 1]
    assert over_one
    collapsed = [
        case
        for case in CASES
        if case["parameters"].get("top_k", 1) > 1 and not isinstance(case["answer"][0], list)
    ]
    assert collapsed
    assert any([0, 0] in [one[:2] for one in as_list(case)] for case in CASES)


def as_list(case: dict[str, Any]) -> list[list[float]]:
    result = case["answer"]
    return result if isinstance(result[0], list) else [result]


def first_score(case: dict[str, Any]) -> float:
    return as_list(case)[0][2]


def test_without_compat_scores_stay_below_one(
    compat: tuple[QuestionAnswering, TorchEngine],
) -> None:
    task, engine = compat
    parameters = QuestionAnsweringParameters(
        max_seq_len=48, doc_stride=12, max_answer_len=1, top_k=20
    )
    prepared = task.prepare(ask("long", "same"), parameters)
    result = prepared.finish(engine.run(prepared.inputs))
    assert isinstance(result, list)
    assert sum(one.score for one in result) <= 1.0


def test_parameters_without_effect_give_a_warning(
    compat: tuple[QuestionAnswering, TorchEngine],
) -> None:
    task, _ = compat
    parameters = QuestionAnsweringParameters(
        compat=True, max_question_len=2, null_score_diff_threshold=3.0
    )
    prepared = task.prepare(ask("plain", "short"), parameters)
    assert prepared.num_truncated == 0
    assert prepared.warnings == [
        "with compat, max_question_len has no effect, as it had none there",
        "with compat, null_score_diff_threshold has no effect, as it had none there",
    ]
    whole = task.prepare(ask("plain", "short"), QuestionAnsweringParameters(compat=True))
    assert prepared.inputs == whole.inputs


def test_where_it_failed_there_is_a_reason(compat: tuple[QuestionAnswering, TorchEngine]) -> None:
    with pytest.raises(InvalidInputError, match=r"doc_stride is 44.*choose at most"):
        answer(compat, ask("long", "long"), max_seq_len=48, doc_stride=44)
    with pytest.raises(InvalidInputError, match="choose at most"):
        answer(compat, ask("long", "long"), max_seq_len=48)  # the default is half of it


def test_damaged_logits_are_no_answer(compat: tuple[QuestionAnswering, TorchEngine]) -> None:
    task, _ = compat
    prepared = task.prepare(ask("plain", "word"), QuestionAnsweringParameters(compat=True))
    logits = [np.full((len(item.ids), 2), np.nan, np.float32) for item in prepared.inputs]
    with pytest.raises(EngineError, match="not finite"):
        prepared.finish(logits)


def test_many_candidates_in_many_windows_take_no_long(
    compat: tuple[QuestionAnswering, TorchEngine],
) -> None:
    item = QuestionContext(question="Who?", context="The dog saw Clara. " * 120)
    result = answer(compat, item, top_k=1000, max_answer_len=512)
    assert len({one.answer.lower() for one in result}) == len(result)
