"""Texts of more tokens than the model reads: refused, or cut and counted in a header, over HTTP."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from albert_serve.api.schemas import TRUNCATED_HEADER
from albert_serve.tokenizer import AlbertTokenizer

NUM_WORDS = 200
# One token a word, and characters of several bytes, which count as one.
LONG = "🎉🎉 " + "a " * NUM_WORDS
SHORT = "It is a run."


def post(client: httpx.Client, task: str, inputs: Any, truncation: Any = None) -> httpx.Response:
    body = {"inputs": inputs, "parameters": {"truncation": truncation}}
    return client.post(f"/{task}", json=body)


def num_cut(reply: httpx.Response) -> int:
    assert reply.status_code == 200, reply.text
    return int(reply.headers.get(TRUNCATED_HEADER, "0"))


@pytest.mark.parametrize("truncation", [None, False, "error"])
def test_false_refuses_and_names_the_parameter(client: httpx.Client, truncation: Any) -> None:
    reply = post(client, "text-classification", LONG, truncation)
    assert (reply.status_code, reply.json()["error_type"]) == (422, "too_long")
    assert "set the parameter truncation to true" in reply.json()["error"]
    assert TRUNCATED_HEADER not in reply.headers


@pytest.mark.parametrize("truncation", [True, "truncate"])
def test_true_cuts_and_says_how_much(
    client: httpx.Client, tokenizer: AlbertTokenizer, truncation: Any
) -> None:
    """The part that fits has the same answer."""
    reply = post(client, "text-classification", LONG, truncation)
    encoding = tokenizer.encode_plain(LONG)
    assert num_cut(reply) == len(encoding) + 2 - 128
    offset, _ = encoding.offsets[128 - 2]
    kept = post(client, "text-classification", LONG[:offset].rstrip(), truncation)
    assert TRUNCATED_HEADER not in kept.headers
    assert scores_of(kept) == pytest.approx(scores_of(reply), abs=1e-5)


def scores_of(reply: httpx.Response) -> dict[str, float]:
    return {each["label"]: each["score"] for each in reply.json()[0]}


def test_a_question_is_cut_and_its_context_never(client: httpx.Client) -> None:
    reply = post(client, "question-answering", {"question": LONG, "context": SHORT}, True)
    assert num_cut(reply) > 100
    for truncation in (True, False):
        reply = post(
            client, "question-answering", {"question": "Who?", "context": LONG}, truncation
        )
        assert reply.status_code == 200
        assert TRUNCATED_HEADER not in reply.headers


def test_the_count_of_a_list_is_of_all_its_texts(client: httpx.Client) -> None:
    inputs = [SHORT, LONG, {"text": SHORT, "text_pair": LONG}, {"text": LONG, "text_pair": LONG}]
    reply = post(client, "text-classification", inputs, truncation=True)
    alone = [post(client, "text-classification", item, truncation=True) for item in inputs]
    assert num_cut(reply) == sum(map(num_cut, alone)) > 0
