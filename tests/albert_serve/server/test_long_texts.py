"""Texts of more tokens than the model reads: refused, or cut and reported in headers, over HTTP.

Where each task cuts is in tasks/test_every_task.py.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from albert_serve.api.schemas import MAX_CUTS_SHOWN, TRUNCATED_AT_HEADER, TRUNCATED_HEADER

NUM_WORDS = 200
# One token a word, and characters of several bytes, which count as one.
LONG = "🎉🎉 " + "a " * NUM_WORDS
SHORT = "It is a run."


def post(client: httpx.Client, task: str, inputs: Any, truncation: Any = None) -> httpx.Response:
    body = {"inputs": inputs, "parameters": {"truncation": truncation}}
    return client.post(f"/{task}", json=body)


def cuts_of(reply: httpx.Response) -> dict[str, int]:
    assert reply.status_code == 200, reply.text
    cuts: dict[str, int] = json.loads(reply.headers[TRUNCATED_AT_HEADER])
    return cuts


@pytest.mark.parametrize("truncation", [None, False, "error"])
def test_false_refuses_and_names_the_parameter(client: httpx.Client, truncation: Any) -> None:
    reply = post(client, "text-classification", LONG, truncation)
    assert (reply.status_code, reply.json()["error_type"]) == (422, "too_long")
    assert "set the parameter truncation to true" in reply.json()["error"]
    assert TRUNCATED_HEADER not in reply.headers


@pytest.mark.parametrize("truncation", [True, "truncate"])
def test_true_cuts_and_says_where(client: httpx.Client, truncation: Any) -> None:
    """The text up to the offset fits and has the same answer; with a word more it does not fit."""
    reply = post(client, "text-classification", LONG, truncation)
    [(place, offset)] = cuts_of(reply).items()
    assert place == "inputs"
    assert 0 < int(reply.headers[TRUNCATED_HEADER]) < NUM_WORDS
    kept = post(client, "text-classification", LONG[:offset].rstrip(), truncation)
    assert {TRUNCATED_HEADER, TRUNCATED_AT_HEADER}.isdisjoint(kept.headers)
    assert scores_of(kept) == pytest.approx(scores_of(reply), abs=1e-5)
    more = post(client, "text-classification", LONG[: offset + 1])
    assert more.json()["error_type"] == "too_long"


def scores_of(reply: httpx.Response) -> dict[str, float]:
    return {each["label"]: each["score"] for each in reply.json()[0]}


def test_a_question_is_cut_and_its_context_never(client: httpx.Client) -> None:
    reply = post(client, "question-answering", {"question": LONG, "context": SHORT}, True)
    assert [*cuts_of(reply)] == ["inputs.question"]
    for truncation in (True, False):
        reply = post(
            client, "question-answering", {"question": "Who?", "context": LONG}, truncation
        )
        assert reply.status_code == 200
        assert TRUNCATED_HEADER not in reply.headers


def test_of_a_list_the_places_are_named(client: httpx.Client) -> None:
    inputs = [SHORT, LONG, {"text": SHORT, "text_pair": LONG}, {"text": LONG, "text_pair": LONG}]
    reply = post(client, "text-classification", inputs, truncation=True)
    alone = [post(client, "text-classification", item, truncation=True) for item in inputs[1:]]
    assert cuts_of(reply) == {
        "inputs[1]": cuts_of(alone[0])["inputs"],
        "inputs[2].text_pair": cuts_of(alone[1])["inputs.text_pair"],
        "inputs[3].text": cuts_of(alone[2])["inputs.text"],
        "inputs[3].text_pair": cuts_of(alone[2])["inputs.text_pair"],
    }
    num_cut = sum(int(one.headers[TRUNCATED_HEADER]) for one in alone)
    assert int(reply.headers[TRUNCATED_HEADER]) == num_cut


def test_the_header_has_a_limit(client: httpx.Client) -> None:
    sentences = ["a " * NUM_WORDS] * (MAX_CUTS_SHOWN + 6)
    reply = post(client, "sentence-order", {"sentences": sentences}, truncation=True)
    assert [*cuts_of(reply)] == [f"inputs.sentences[{i}]" for i in range(MAX_CUTS_SHOWN)]
