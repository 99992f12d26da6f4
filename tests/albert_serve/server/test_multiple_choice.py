"""`/multiple-choice` over HTTP: answers, refusals, limits, both clients and BentoML's own."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from albert_serve.api.schemas import (
    ChoiceQuestion,
    InfoReply,
)
from albert_serve.client import AlbertClient, AsyncAlbertClient
from albert_serve.errors import InvalidInputError, NotFoundError
from tests.albert_serve.support import MAX_ITEMS, Running

QUESTION = {
    "context": "The bridge was built in 1932 and closed to cars in 1988.",
    "question": "The bridge was closed to _ in 1988.",
    "choices": ["ships", "cars", "trains"],
}
ENDINGS = {"context": "It rained all day.", "choices": ["We got wet.", "We got lost."]}


def post(choice_client: httpx.Client, inputs: Any, **parameters: Any) -> httpx.Response:
    return choice_client.post("/multiple-choice", json={"inputs": inputs, "parameters": parameters})


def test_one_question_has_a_list_of_choices_and_several_have_lists(
    choice_client: httpx.Client,
) -> None:
    one = post(choice_client, QUESTION).json()
    assert {choice["label"]: choice["index"] for choice in one} == {
        "ships": 0,
        "cars": 1,
        "trains": 2,
    }
    assert sum(choice["score"] for choice in one) == pytest.approx(1)
    scores = [choice["score"] for choice in one]
    assert scores == sorted(scores, reverse=True)
    first, second = post(choice_client, [QUESTION, ENDINGS]).json()
    assert [choice["index"] for choice in first] == [choice["index"] for choice in one]
    assert [choice["score"] for choice in first] == pytest.approx(scores, abs=1e-5)
    assert {choice["label"] for choice in second} == set(ENDINGS["choices"])
    assert post(choice_client, QUESTION, top_k=1).json() == one[:1]


def test_a_model_without_the_head_answers_404(service: Running) -> None:
    reply = httpx.post(f"{service.url}/multiple-choice", json={"inputs": QUESTION}, timeout=30)
    assert reply.status_code == 404
    assert "has no multiple-choice. It has fill-mask" in reply.json()["error"]
    with AlbertClient(service.url) as client, pytest.raises(NotFoundError):
        client.multiple_choice(QUESTION)


def test_info_lists_the_task_and_its_limit(choice_client: httpx.Client) -> None:
    info = InfoReply.model_validate_json(choice_client.get("/info").content)
    assert [task.name for task in info.tasks] == ["multiple-choice", "feature-extraction"]
    assert info.max_choices == 256


def test_both_clients_split_a_list_by_its_choices(choice_service: Running) -> None:
    questions = [QUESTION] * MAX_ITEMS
    with AlbertClient(choice_service.url) as client:
        alone = client.multiple_choice(ChoiceQuestion.model_validate(QUESTION))
        several = client.multiple_choice(questions)
        best = client.multiple_choice(QUESTION, top_k=1)
        with pytest.raises(InvalidInputError, match=r"inputs\[1\].choices must hold at least 2"):
            client.multiple_choice([QUESTION, {"context": "a", "choices": ["b"]}])

    async def ask() -> Any:
        async with AsyncAlbertClient(choice_service.url) as client:
            return await client.multiple_choice(questions)

    assert len(several) == MAX_ITEMS
    assert best == alone[:1]
    for answers in (several, asyncio.run(ask())):
        for answer in answers:
            assert [one.index for one in answer] == [one.index for one in alone]
            expected = [one.score for one in alone]
            assert [one.score for one in answer] == pytest.approx(expected, abs=1e-5)
