"""All tasks: errors by reason, limits of cost, truncation, damaged logits."""

from __future__ import annotations

from dataclasses import replace
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
from albert_serve.tasks import TASKS, EncoderInput, Prepared, TaskSetup, open_task, prepare_request

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
    for rows in logits:
        rows[0, 0] = value
    with pytest.raises(EngineError, match="not finite"):
        prepared.finish(logits)


@pytest.mark.parametrize("task", LONG_ITEMS)
def test_a_long_text_is_rejected_or_truncated_and_counted(task: str, task_setup: TaskSetup) -> None:
    items = [ITEMS[task], LONG_ITEMS[task]]
    with pytest.raises(TextTooLongError, match=r"^inputs\[1\]: .*truncation"):
        prepare(task_setup, task, items)
    whole, truncated = prepare(task_setup, task, items, truncation=True)
    assert whole.num_truncated == 0
    assert truncated.num_truncated > 0
    assert max(len(item.ids) for item in truncated.inputs) <= 128


def pair_of(num_first: int, num_second: int) -> dict[str, str]:
    return {"text": "a " * num_first, "text_pair": "a " * num_second}


@pytest.mark.parametrize(
    ("task", "fitting", "long"),
    [
        ("text-classification", "a " * 126, "a " * 127),
        ("text-classification", pair_of(65, 60), pair_of(65, 61)),
        ("sentence-order", pair_of(3, 122), pair_of(4, 122)),
    ],
)
def test_a_text_may_have_as_many_tokens_as_the_model_has_positions(
    task: str, fitting: Any, long: Any, task_setup: TaskSetup
) -> None:
    [prepared] = prepare(task_setup, task, fitting)
    assert len(prepared.inputs[0].ids) == 128
    with pytest.raises(TextTooLongError, match=r"129 tokens.* at most 128"):
        prepare(task_setup, task, long)


@pytest.mark.parametrize(
    ("task", "inputs", "parameters", "error", "message"),
    [
        ("fill-mask", "a", {}, NoMaskError, r"\[MASK\]"),
        ("fill-mask", f"{LONG}[MASK]", {"truncation": True}, NoMaskError, "first 128 tokens"),
        ("fill-mask", "[MASK]", {"targets": [" ", "\u0301"]}, InvalidInputError, "targets"),
        ("text-classification", "a", {"head": "x"}, InvalidInputError, "'x'.* default"),
        ("text-classification", " \n", {}, InvalidInputError, "^text is empty"),
        ("token-classification", "\u0301", {}, InvalidInputError, "^text is empty"),
        (
            *("text-classification", {"text": "a", "text_pair": " "}, {}),
            *(InvalidInputError, "^text_pair is empty"),
        ),
        (
            *("sentence-order", {"sentences": ["a", "\u0301", "b"]}, {}),
            *(InvalidInputError, r"^sentences\[1\] is empty"),
        ),
        (
            *("question-answering", {"question": "a", "context": "\u0301"}, {}),
            *(InvalidInputError, "^context is empty"),
        ),
    ],
)
def test_an_item_that_cannot_be_answered_is_rejected_with_the_reason(
    task: str,
    inputs: Any,
    parameters: dict[str, Any],
    error: type[InvalidInputError],
    message: str,
    task_setup: TaskSetup,
) -> None:
    with pytest.raises(error, match=message):
        prepare(task_setup, task, inputs, **parameters)


class Stub:
    """A task that counts its items, which all have the same cost."""

    def __init__(self, num_tokens: int = 1, num_masks: int = 1, answer_bytes: int = 0) -> None:
        row = EncoderInput(ids=[0] * num_tokens, types=[], task="fill-mask", rows=[0] * num_masks)
        self.prepared: Prepared[Any] = Prepared(
            inputs=[row], finish=list, answer_bytes=answer_bytes
        )
        self.num_items = 0

    def prepare(self, item: Any, parameters: Any) -> Prepared[Any]:
        self.num_items += 1
        return self.prepared


@pytest.mark.parametrize(
    ("task", "limit", "message"),
    [
        (Stub(num_tokens=500), 2, "1000 tokens"),
        (Stub(num_masks=128), 8, f"{MAX_MASKS} "),
        (Stub(answer_bytes=1 << 23), 8, "67108864 bytes"),
    ],
    ids=["tokens", "masks", "bytes"],
)
def test_a_request_has_limits_for_all_items_together(task: Stub, limit: int, message: str) -> None:
    """The items beyond the limit are not prepared."""
    task.num_items = 0
    at_limit = prepare_request(task, read("fill-mask", ["a"] * limit), max_tokens=1000)
    assert len(at_limit) == task.num_items == limit
    with pytest.raises(TooMuchAtOnceError, match=message):
        prepare_request(task, read("fill-mask", ["a"] * 3 * limit), max_tokens=1000)
    assert task.num_items == limit + limit + 1


def test_characters_are_limited_before_any_item_is_encoded() -> None:
    stub = Stub()
    for max_tokens, num_chars in ((10, 1_000_000), (40_000, 1_280_000)):
        texts = ["x" * (num_chars // 2)] * 2
        assert prepare_request(stub, read("fill-mask", texts), max_tokens=max_tokens)
        stub.num_items = 0
        with pytest.raises(TooMuchAtOnceError, match=f"at most {num_chars} "):
            prepare_request(stub, read("fill-mask", [*texts, "x"]), max_tokens=max_tokens)
        assert stub.num_items == 0


QUESTION = {"question": "a", "context": "a a a"}


@pytest.mark.parametrize(
    ("task", "item", "parameters", "num_bytes"),
    [
        ("fill-mask", "a [MASK] a [MASK]", {"top_k": 3}, 2 * 3 * (500 + 6 * 8)),
        ("fill-mask", "a [MASK] a [MASK]", {"targets": ["a", "b"]}, 2 * 2 * (500 + 6 * 8)),
        ("question-answering", QUESTION, {"top_k": 99}, 9 * (500 + 5)),
        ("question-answering", QUESTION, {"top_k": 2}, 2 * (500 + 5)),
        (*("question-answering", QUESTION), *({"top_k": 99, "max_answer_len": 2}, 6 * (500 + 3))),
        ("sentence-order", ITEMS["sentence-order"], {}, 2 * 500),
        ("token-classification", "a a a", {}, 3 * 500),
        ("feature-extraction", "a a a", {}, 64 * 56),
        ("feature-extraction", "a a a", {"pooling": "none"}, 5 * 64 * 56),
    ],
)
def test_the_memory_of_an_answer_is_estimated(
    task: str, item: Any, parameters: dict[str, Any], num_bytes: int, task_setup: TaskSetup
) -> None:
    [prepared] = prepare(task_setup, task, item, **parameters)
    assert prepared.answer_bytes == num_bytes


@pytest.mark.parametrize(
    ("context", "parameters", "message"),
    [
        ("a " * 54, {"max_seq_len": 32, "doc_stride": 27}, "doc_stride"),
        ("a " * 32_768, {"max_answer_len": 512}, "max_answer_len to 511"),
    ],
)
def test_the_work_of_a_question_has_limits(
    context: str, parameters: dict[str, Any], message: str, task_setup: TaskSetup
) -> None:
    """Windows read a token at most 16 times; at most 2**24 spans are compared."""
    at_limit, over = ({"question": "a", "context": text} for text in (context, f"{context}a"))
    assert prepare(task_setup, "question-answering", at_limit, **parameters)
    with pytest.raises(InvalidInputError, match=message):
        prepare(task_setup, "question-answering", over, **parameters)


@pytest.mark.parametrize(
    ("num_question", "num_context", "fitting", "excessive", "message"),
    [
        (4, 130, {"max_seq_len": 128}, {"max_seq_len": 129}, "max_seq_len is 129.* at most 128"),
        (200, 16, {"max_question_len": 124}, {"max_question_len": 125}, "no room"),
        (10, 130, {"doc_stride": 114}, {"doc_stride": 115}, "doc_stride is 115.* 115 tokens.* 114"),
        (10, 115, {"doc_stride": 115}, {"doc_stride": 115, "max_seq_len": 127}, "doc_stride is"),
    ],
)
def test_lengths_of_a_question_fit_the_model(
    num_question: int,
    num_context: int,
    fitting: dict[str, int],
    excessive: dict[str, int],
    message: str,
    task_setup: TaskSetup,
) -> None:
    item = {"question": "a " * num_question, "context": "a " * num_context}
    [prepared] = prepare(task_setup, "question-answering", item, **fitting)
    assert max(len(window.ids) for window in prepared.inputs) == 128
    assert prepared.num_truncated == max(0, num_question - 124)
    with pytest.raises(InvalidInputError, match=message):
        prepare(task_setup, "question-answering", item, **excessive)


def test_windows_of_a_question_have_384_tokens_and_share_128(task_setup: TaskSetup) -> None:
    setup = replace(task_setup, max_positions=512)
    setup = replace(setup, heads={"question-answering": setup.head})
    item = {"question": "a", "context": "a " * 1000}
    [prepared] = prepare(setup, "question-answering", item)
    assert [len(window.ids) for window in prepared.inputs] == [384, 384, 384, 4 + 1000 - 3 * 252]
