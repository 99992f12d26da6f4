"""Limits of a request's cost: a small one that asks for very much is refused before the work."""

from __future__ import annotations

from typing import Any

import pytest

from albert_serve.api.schemas import TaskRequest
from albert_serve.errors import InvalidInputError, TextTooLongError, TooMuchAtOnceError
from albert_serve.tasks import TASKS, TaskSetup, open_task, prepare_request
from albert_serve.tokenizer import MAX_TOKENS, AlbertTokenizer

WORDS = "The run was scored in the first inning. "


def request(task: str, inputs: Any, **parameters: Any) -> TaskRequest:
    return TASKS[task].request.model_validate({"inputs": inputs, "parameters": parameters})


def prepare(setup: TaskSetup, task: str, inputs: Any, **parameters: Any) -> int:
    """The number of prepared items."""
    task_request = request(task, inputs, **parameters)
    return len(prepare_request(open_task(task, setup), task_request))


def test_answers_that_take_much_memory_are_refused(task_setup: TaskSetup) -> None:
    text = "[MASK] " * 64
    assert prepare(task_setup, "fill-mask", [text] * 16, top_k=5) == 16
    with pytest.raises(TooMuchAtOnceError, match="lower top_k"):
        prepare(task_setup, "fill-mask", [text] * 16, top_k=1000)
    several = {"question": "Who?", "context": WORDS * 20}
    assert prepare(task_setup, "question-answering", [several] * 30) == 30
    assert prepare(task_setup, "question-answering", several, top_k=1000) == 1
    with pytest.raises(TooMuchAtOnceError, match="lower top_k"):
        prepare(task_setup, "question-answering", [several] * 200, top_k=1000, max_answer_len=512)


def test_items_past_what_is_read_at_once_are_not_made_ready(task_setup: TaskSetup) -> None:
    task = open_task("sentence-order", task_setup)
    prepared: list[Any] = []

    class Counted:
        def prepare(self, item: Any, parameters: Any) -> Any:
            prepared.append(item)
            return task.prepare(item, parameters)

    task_request = request(
        "sentence-order", [{"sentences": ["It rained."] * 12}] * 30, reorder=True
    )
    with pytest.raises(TooMuchAtOnceError, match="has over 1000 tokens"):
        prepare_request(Counted(), task_request, max_tokens=1000)
    assert len(prepared) < 5


def test_each_choice_counts_with_its_context(task_setup: TaskSetup) -> None:
    task = open_task("multiple-choice", task_setup)
    question = {"context": WORDS * 4, "question": "What was scored?", "choices": ["A run."] * 40}
    task_request = request("multiple-choice", question)
    [prepared] = prepare_request(task, task_request)
    least = len(task_setup.tokenizer.encode(WORDS * 4))
    assert prepared.num_tokens > 40 * least
    with pytest.raises(TooMuchAtOnceError, match=f"has over {40 * least} tokens"):
        prepare_request(task, task_request, max_tokens=40 * least)


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
