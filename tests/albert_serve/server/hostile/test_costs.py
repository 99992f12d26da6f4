"""Limits of a request's cost: a small one that asks for very much is refused before the work."""

from __future__ import annotations

import gzip
import json
from typing import Any

import httpx
import numpy as np
import pytest

from albert_serve.api.schemas import TaskRequest
from albert_serve.errors import InvalidInputError, TextTooLongError, TooMuchAtOnceError
from albert_serve.tasks import TASKS, TaskSetup, open_task, prepare_request
from albert_serve.tasks.fill_mask import targets
from albert_serve.tasks.question_answering import spans
from albert_serve.tokenizer import MAX_TOKENS, AlbertTokenizer

JSON = {"content-type": "application/json"}
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


def test_targets_are_read_once_for_all_texts(task_setup: TaskSetup) -> None:
    words = [f"word{number}" for number in range(50)]
    targets.read_first_pieces.cache_clear()
    assert prepare(task_setup, "fill-mask", ["A [MASK]."] * 20, targets=words) == 20
    assert targets.read_first_pieces.cache_info().misses == 1


def test_windows_and_spans_without_bound_are_refused(task_setup: TaskSetup) -> None:
    long = {"question": "Who?", "context": "a " * 200_000}
    with pytest.raises(InvalidInputError, match="lower doc_stride"):
        prepare(task_setup, "question-answering", long, max_seq_len=16, doc_stride=8)
    with pytest.raises(InvalidInputError, match="lower max_answer_len to"):
        prepare(task_setup, "question-answering", long, max_answer_len=512)


@pytest.mark.parametrize("num_held", [1, 7, 100])
def test_spans_found_in_parts_are_those_found_at_once(
    num_held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(0)
    for _ in range(50):
        num_tokens = int(random.integers(1, 40))
        bounds = np.sort(random.integers(0, 30, size=num_tokens))
        ends = np.maximum.accumulate(bounds + random.integers(0, 4, size=num_tokens))
        offsets = [(int(start), int(end)) for start, end in zip(bounds, ends, strict=True)]
        logits = random.normal(size=(1 + num_tokens, 2)).astype(np.float32)
        top_k = int(random.integers(1, 30))
        whole = spans.find_spans(logits, offsets, max_answer_len=9, top_k=top_k)
        with monkeypatch.context() as patched:
            patched.setattr(spans, "_MAX_HELD", num_held)
            parts = spans.find_spans(logits, offsets, max_answer_len=9, top_k=top_k)
        assert [(one.start, one.end) for one in parts.best] == [
            (one.start, one.end) for one in whole.best
        ]
        assert [one.logit for one in parts.best] == pytest.approx([one.logit for one in whole.best])


def test_characters_that_stand_for_many_are_counted_as_many(tokenizer: AlbertTokenizer) -> None:
    assert len(tokenizer.encode_plain("\ufdfa" * 20)) > 100
    with pytest.raises(TextTooLongError, match="200000 characters stands for 3600000"):
        tokenizer.encode_plain("\ufdfa" * 200_000)


def test_a_text_of_very_many_tokens_is_refused(tokenizer: AlbertTokenizer) -> None:
    with pytest.raises(TextTooLongError, match=f"at most {MAX_TOKENS} are read"):
        tokenizer.encode_plain("1 " * 450_000)


@pytest.mark.parametrize(
    ("body", "headers", "status", "message"),
    [
        pytest.param('{"inputs": "é"}'.encode("utf-16"), {}, 400, "utf-8", id="UTF-16"),
        pytest.param(b'{"inputs": "\xed\xa0\x80"}', {}, 400, "utf-8", id="half a surrogate"),
        pytest.param(b'{"inputs": NaN}', {}, 400, "NaN is not a number in JSON", id="NaN"),
        pytest.param(b'{"inputs": -Infinity}', {}, 400, "-Infinity is not", id="infinity"),
        pytest.param(b'{"inputs": 1e999}', {}, 422, "not inf", id="past all numbers"),
        pytest.param(
            gzip.compress(b'{"inputs": "a"}'),
            {"content-encoding": "gzip"},
            415,
            "content encoding is 'gzip'",
            id="compressed",
        ),
    ],
)
def test_bodies_that_are_not_json_as_it_is(
    client: httpx.Client, body: bytes, headers: dict[str, str], status: int, message: str
) -> None:
    reply = client.post("/text-classification", content=body, headers={**JSON, **headers})
    assert reply.status_code == status
    assert message in reply.json()["error"]


def test_a_mark_before_the_json_is_passed_over(client: httpx.Client) -> None:
    body = b"\xef\xbb\xbf" + json.dumps({"inputs": "A run."}).encode()
    assert client.post("/text-classification", content=body, headers=JSON).status_code == 200


@pytest.mark.parametrize("name", ["parameters", "truncation", "top_k", "targets", "joint"])
def test_null_means_the_default_and_the_document_says_so(client: httpx.Client, name: str) -> None:
    null = {"parameters": None} if name == "parameters" else {"parameters": {name: None}}
    reply = client.post("/fill-mask", json={"inputs": "A [MASK].", **null})
    assert reply.json() == client.post("/fill-mask", json={"inputs": "A [MASK]."}).json()
    schemas = client.get("/docs.json").json()["components"]["schemas"]
    described = schemas["FillMaskRequest" if name == "parameters" else "FillMaskParameters"]
    assert {"type": "null"} in described["properties"][name]["anyOf"]
