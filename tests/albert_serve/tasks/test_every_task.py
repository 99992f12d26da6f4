"""What holds of every task: refusals by reason, limits of cost, truncation, damaged logits."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pytest

from albert_serve.api.schemas import MAX_MASKS, TaskRequest
from albert_serve.errors import (
    EngineError,
    InvalidInputError,
    NoMaskError,
    TextTooLongError,
    TooMuchAtOnceError,
)
from albert_serve.tasks import TASKS, Prepared, TaskSetup, open_task, prepare_request
from albert_serve.tokenizer import MAX_TOKENS, AlbertTokenizer

ITEMS: Final[dict[str, Any]] = {
    "fill-mask": "a [MASK]",
    "text-classification": "a",
    "question-answering": {"question": "Who?", "context": "a b c"},
    "sentence-order": {"sentences": ["a", "b", "c"]},
    "token-classification": "a",
    "feature-extraction": "a",
}
LONG = "a " * 200
# Items that do not fit, of tasks that do not read any length.
LONG_ITEMS: Final[dict[str, Any]] = {
    "fill-mask": f"[MASK] {LONG}",
    "text-classification": {"text": "b", "text_pair": LONG},
    "question-answering": {"question": LONG, "context": "a b c"},
    "sentence-order": {"text": LONG, "text_pair": "b"},
    "feature-extraction": LONG,
}


def read(task: str, inputs: Any, **parameters: Any) -> TaskRequest:
    return TASKS[task].request.model_validate({"inputs": inputs, "parameters": parameters})


def prepare(setup: TaskSetup, task: str, inputs: Any, **parameters: Any) -> list[Prepared[Any]]:
    return prepare_request(open_task(task, setup), read(task, inputs, **parameters))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("task", TASKS)
def test_logits_that_are_not_finite_are_no_answer(
    task: str, value: float, task_setup: TaskSetup
) -> None:
    [prepared] = prepare(task_setup, task, ITEMS[task])
    shape = (128, 64 if task == "feature-extraction" else 2)
    logits = [np.zeros(shape, np.float32) for _ in prepared.inputs]
    for each in logits:
        each[0, 0] = value
    with pytest.raises(EngineError, match="not finite"):
        prepared.finish(logits)


@pytest.mark.parametrize("task", LONG_ITEMS)
def test_a_long_text_is_refused_or_cut_and_counted(task: str, task_setup: TaskSetup) -> None:
    item = LONG_ITEMS[task]
    with pytest.raises(TextTooLongError, match=r"^inputs\[1\]: .*truncation"):
        prepare(task_setup, task, [ITEMS[task], item])
    request = read(task, [ITEMS[task], item], truncation=True)
    whole, cut = prepare_request(open_task(task, task_setup), request)
    assert whole.num_truncated == 0
    assert cut.num_truncated > 0
    assert max(len(each.ids) for each in cut.inputs) <= 128


@pytest.mark.parametrize(
    ("task", "inputs", "parameters", "error", "message"),
    [
        ("fill-mask", "a", {}, NoMaskError, r"write \[MASK\]"),
        ("fill-mask", f"{LONG}[MASK]", {"truncation": True}, NoMaskError, "were cut off"),
        ("fill-mask", "[MASK]", {"targets": [" ", "\u0301"]}, InvalidInputError, "none of the"),
        ("text-classification", "a", {"head": "topic"}, InvalidInputError, "no head 'topic'"),
        ("text-classification", " \n", {}, InvalidInputError, "^text is empty"),
        ("text-classification", "a " * 128, {}, TextTooLongError, "130 tokens.*most 128.*cuts"),
        (
            *("text-classification", {"text": "a " * 70, "text_pair": "b " * 70}, {}),
            *(TextTooLongError, "at most 128"),
        ),
        (
            *("sentence-order", {"sentences": ["a", "\u0301", "b"]}, {}, InvalidInputError),
            r"^sentences\[1\] is empty",
        ),
        ("token-classification", "\u0301", {}, InvalidInputError, "^text is empty"),
        (
            *("question-answering", {"question": "a", "context": "\u0301"}, {}),
            *(InvalidInputError, "^context is empty"),
        ),
        (
            *("question-answering", ITEMS["question-answering"], {"max_seq_len": 129}),
            *(InvalidInputError, "at most 128"),
        ),
        (
            *("question-answering", {"question": "a", "context": LONG}, {"doc_stride": 124}),
            *(InvalidInputError, "choose at most"),
        ),
        (
            *("question-answering", {"question": "a", "context": "b " * 999}, {"doc_stride": 120}),
            *(InvalidInputError, "windows of 128"),
        ),
    ],
)
def test_what_cannot_be_answered_is_refused_with_the_reason(
    task: str,
    inputs: Any,
    parameters: dict[str, Any],
    error: type[InvalidInputError],
    message: str,
    task_setup: TaskSetup,
) -> None:
    with pytest.raises(error, match=message):
        prepare(task_setup, task, inputs, **parameters)


def test_a_request_of_very_many_masks_is_refused(task_setup: TaskSetup) -> None:
    """Each mask's logits are as wide as the vocabulary, and all are held until the answer."""
    inputs = ["[MASK] " * 13] * 80
    with pytest.raises(TooMuchAtOnceError, match=f"at most {MAX_MASKS} are read at once"):
        prepare(task_setup, "fill-mask", inputs)
    assert len(prepare(task_setup, "fill-mask", inputs[:3])) == 3


WORDS = "The run was scored in the first inning. "


def test_answers_that_take_much_memory_are_refused(task_setup: TaskSetup) -> None:
    text = "[MASK] " * 64
    assert len(prepare(task_setup, "fill-mask", [text] * 16, top_k=5)) == 16
    with pytest.raises(TooMuchAtOnceError, match="lower top_k"):
        prepare(task_setup, "fill-mask", [text] * 16, top_k=1000)
    several = {"question": "Who?", "context": WORDS * 20}
    assert len(prepare(task_setup, "question-answering", [several] * 30)) == 30
    assert len(prepare(task_setup, "question-answering", several, top_k=1000)) == 1
    with pytest.raises(TooMuchAtOnceError, match="lower top_k"):
        prepare(task_setup, "question-answering", [several] * 200, top_k=1000, max_answer_len=512)


def test_items_past_what_is_read_at_once_are_not_made_ready(task_setup: TaskSetup) -> None:
    task = open_task("sentence-order", task_setup)
    prepared: list[Any] = []

    class Counted:
        def prepare(self, item: Any, parameters: Any) -> Any:
            prepared.append(item)
            return task.prepare(item, parameters)

    task_request = read("sentence-order", [{"sentences": ["It rained."] * 100}] * 30)
    with pytest.raises(TooMuchAtOnceError, match="has over 1000 tokens"):
        prepare_request(Counted(), task_request, max_tokens=1000)
    assert len(prepared) < 5


def test_windows_and_spans_without_bound_are_refused(task_setup: TaskSetup) -> None:
    long = {"question": "Who?", "context": "a " * 200_000}
    with pytest.raises(InvalidInputError, match="lower doc_stride"):
        prepare(task_setup, "question-answering", long, max_seq_len=16, doc_stride=8)
    with pytest.raises(InvalidInputError, match="lower max_answer_len to"):
        prepare(task_setup, "question-answering", long, max_answer_len=512)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\ufdfa" * 200_000, "200000 characters stands for 3600000"),
        ("1 " * 450_000, f"at most {MAX_TOKENS} are read"),
    ],
)
def test_a_text_that_becomes_very_many_tokens_is_refused(
    tokenizer: AlbertTokenizer, text: str, message: str
) -> None:
    with pytest.raises(TextTooLongError, match=message):
        tokenizer.encode_plain(text)
