"""Texts of more tokens than the model reads: refused, or cut and reported, over HTTP."""

from __future__ import annotations

import copy
import json
from typing import Any

import httpx
import pytest

from albert_serve.api.schemas import MAX_CUTS_SHOWN, TRUNCATED_AT_HEADER, TRUNCATED_HEADER

NUM_WORDS = 200
# One token a word, and characters of several bytes, which count as one.
LONG = "🎉🎉 " + "a " * NUM_WORDS
MASKED = f"[MASK] {LONG}"
SHORT = "It is a run."
# The inputs, and the field that is too long.
TOO_LONG: dict[str, tuple[str, Any, str]] = {
    "fill-mask": ("fill-mask", MASKED, ""),
    "text-classification": ("text-classification", LONG, ""),
    "text of a pair": ("text-classification", {"text": LONG, "text_pair": SHORT}, ".text"),
    "second text": ("text-classification", {"text": SHORT, "text_pair": LONG}, ".text_pair"),
    "sentence-order": ("sentence-order", {"text": SHORT, "text_pair": LONG}, ".text_pair"),
    "sentences": ("sentence-order", {"sentences": [SHORT, LONG, SHORT]}, ".sentences[1]"),
}
QUESTION = {"question": LONG, "context": SHORT}
cases = pytest.mark.parametrize(("task", "inputs", "field"), TOO_LONG.values(), ids=[*TOO_LONG])


def post(client: httpx.Client, task: str, inputs: Any, truncation: Any = None) -> httpx.Response:
    body = {"inputs": inputs, "parameters": {"truncation": truncation}}
    return client.post(f"/{task}", json=body)


def text_at(inputs: Any, field: str) -> str:
    """The text of a field, such as ".sentences[1]"."""
    if not field:
        return str(inputs)
    name, _, index = field.removeprefix(".").partition("[")
    return str(inputs[name][int(index.rstrip("]"))] if index else inputs[name])


def with_text(inputs: Any, field: str, text: str) -> Any:
    """The inputs with another text in a field."""
    if not field:
        return text
    name, _, index = field.removeprefix(".").partition("[")
    changed = copy.deepcopy(inputs)
    if index:
        changed[name][int(index.rstrip("]"))] = text
    else:
        changed[name] = text
    return changed


def cuts_of(reply: httpx.Response) -> dict[str, int]:
    assert reply.status_code == 200, reply.text
    cuts: dict[str, int] = json.loads(reply.headers[TRUNCATED_AT_HEADER])
    return cuts


@cases
@pytest.mark.parametrize("truncation", [None, False, "error"])
def test_false_refuses_and_names_the_parameter(
    client: httpx.Client, task: str, inputs: Any, field: str, truncation: Any
) -> None:
    reply = post(client, task, inputs, truncation)
    assert (reply.status_code, reply.json()["error_type"]) == (422, "too_long")
    assert "set the parameter truncation to true" in reply.json()["error"]
    assert TRUNCATED_HEADER not in reply.headers


@cases
@pytest.mark.parametrize("truncation", [True, "truncate"])
def test_true_cuts_and_says_where(
    client: httpx.Client, task: str, inputs: Any, field: str, truncation: Any
) -> None:
    """The text up to the offset fits and has the same answer; with a word more it does not fit."""
    reply = post(client, task, inputs, truncation)
    [(place, offset)] = cuts_of(reply).items()
    assert place == f"inputs{field}"
    assert 0 < int(reply.headers[TRUNCATED_HEADER]) < NUM_WORDS
    text = text_at(inputs, field)
    kept = post(client, task, with_text(inputs, field, text[:offset].rstrip()))
    assert kept.status_code == 200
    if task != "fill-mask":  # whose answers hold the text
        assert scores_of(kept.json()) == pytest.approx(scores_of(reply.json()), abs=1e-5)
    more = post(client, task, with_text(inputs, field, text[: offset + 1]))
    assert more.json()["error_type"] == "too_long"


def scores_of(answer: Any) -> list[float]:
    """All floats of an answer, in order."""
    if isinstance(answer, list | dict):
        parts = answer.values() if isinstance(answer, dict) else answer
        return [score for part in parts for score in scores_of(part)]
    return [answer] if isinstance(answer, float) else []


def test_a_question_is_cut_and_its_context_never(client: httpx.Client) -> None:
    refused = post(client, "question-answering", QUESTION, truncation=False)
    assert refused.json()["error_type"] == "too_long"
    assert "the parameter truncation" in refused.json()["error"]
    reply = post(client, "question-answering", QUESTION, truncation=True)
    [(place, offset)] = cuts_of(reply).items()
    assert place == "inputs.question"
    body = {
        "inputs": {**QUESTION, "question": LONG[:offset]},
        "parameters": {"max_answer_len": 15},
    }
    assert client.post("/question-answering", json=body).json()["answer"] == reply.json()["answer"]
    long_context = {"question": "What is it?", "context": LONG}
    for truncation in (True, False):
        reply = post(client, "question-answering", long_context, truncation)
        assert reply.status_code == 200
        assert TRUNCATED_HEADER not in reply.headers


def test_both_texts_of_a_pair_may_be_cut(client: httpx.Client) -> None:
    reply = post(client, "text-classification", {"text": LONG, "text_pair": LONG}, truncation=True)
    assert set(cuts_of(reply)) == {"inputs.text", "inputs.text_pair"}


def test_of_a_list_the_places_are_named(client: httpx.Client) -> None:
    inputs = [SHORT, LONG, {"text": SHORT, "text_pair": LONG}]
    reply = post(client, "text-classification", inputs, truncation=True)
    alone = [post(client, "text-classification", item, truncation=True) for item in inputs[1:]]
    assert cuts_of(reply) == {
        "inputs[1]": cuts_of(alone[0])["inputs"],
        "inputs[2].text_pair": cuts_of(alone[1])["inputs.text_pair"],
    }
    num_cut = sum(int(one.headers[TRUNCATED_HEADER]) for one in alone)
    assert int(reply.headers[TRUNCATED_HEADER]) == num_cut


def test_the_header_has_a_limit(client: httpx.Client) -> None:
    sentences = ["a " * NUM_WORDS] * (MAX_CUTS_SHOWN + 6)
    reply = post(client, "sentence-order", {"sentences": sentences}, truncation=True)
    assert [*cuts_of(reply)] == [f"inputs.sentences[{i}]" for i in range(MAX_CUTS_SHOWN)]


def test_nothing_is_reported_where_nothing_is_cut(client: httpx.Client) -> None:
    reply = post(client, "text-classification", SHORT, truncation=True)
    assert reply.status_code == 200
    assert {TRUNCATED_HEADER, TRUNCATED_AT_HEADER}.isdisjoint(reply.headers)


def test_the_document_names_the_parameter_and_the_headers(client: httpx.Client) -> None:
    document = client.get("/docs.json").json()
    for task in ("fill-mask", "text-classification", "question-answering", "sentence-order"):
        name = task.title().replace("-", "")
        described = document["components"]["schemas"][f"{name}Parameters"]["properties"]
        assert described["truncation"]["anyOf"] == [{"type": "boolean"}, {"type": "null"}]
        assert described["truncation"]["default"] is False
        headers = document["paths"][f"/{task}"]["post"]["responses"]["200"]["headers"]
        assert {TRUNCATED_HEADER, TRUNCATED_AT_HEADER} <= set(headers)
