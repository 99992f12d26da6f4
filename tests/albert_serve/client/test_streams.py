"""Streams of both clients: rows of any number, their answers in order, and their errors."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from albert_serve.client import AsyncAlbertClient
from albert_serve.errors import InvalidInputError, NoMaskError, UnauthorizedError
from tests.albert_serve.client.twins import (
    URL,
    Answer,
    Scripted,
    Twin,
    numbers_of,
    orders,
    pairs,
    refused,
)
from tests.albert_serve.support import MAX_ITEMS, Running

MakeService = Callable[..., tuple[Any, Scripted]]


def test_many_rows_against_the_running_service(twin: Callable[..., Twin], service: Running) -> None:
    texts = [f"The {'e ' * (number % 40)}[MASK] was born." for number in range(5 * MAX_ITEMS)]
    texts[70] = "no mask"
    texts[MAX_ITEMS] = 3  # type: ignore[call-overload]
    client = twin(service.url, timeout_s=120)
    answers = list(client.with_errors("fill-mask", texts, top_k=1))
    assert len(answers) == len(texts)
    assert isinstance(answers[70], NoMaskError)
    assert str(answers[70]).startswith("inputs[70]: ")
    assert isinstance(answers[MAX_ITEMS], InvalidInputError)
    assert answers[MAX_ITEMS].input_index == MAX_ITEMS
    for index in (0, 31, 33, 69, 71, len(texts) - 1):
        [alone] = client.fill_mask(texts[index], top_k=1)
        assert answers[index][0].token == alone.token


def test_rows_are_read_as_answers_are_taken(scripted: MakeService) -> None:
    num_read = 0

    def endless() -> Iterator[dict[str, str]]:
        nonlocal num_read
        for num_read in itertools.count(1):
            yield {"text": str(num_read - 1), "text_pair": "b"}

    def answer(numbers: list[int]) -> tuple[int, Any]:
        assert service.wait_until_open(2)
        time.sleep(0.5 if 0 in numbers else 0)  # the results of many others could wait for it
        return orders(numbers)

    client, service = scripted(answer, max_items=100, max_concurrency=2)
    answers = client.stream("sentence-order", endless())
    assert numbers_of(list(itertools.islice(answers, 300))) == list(range(300))
    answers.close()
    assert 300 <= num_read <= 14 * 32
    assert service.max_open == 2
    assert set(map(len, service.sent)) == {32}


def refusing(*bad: int) -> Answer:
    def answer(numbers: list[int]) -> tuple[int, Any]:
        places = [place for place, number in enumerate(numbers) if number in bad]
        return refused(places[0]) if places else orders(numbers)

    return answer


def test_a_refused_row_ends_the_stream_after_the_answers_before_it(scripted: MakeService) -> None:
    client, _ = scripted(refusing(45, 50, 70), max_items=100)
    taken: list[Any] = []
    with pytest.raises(InvalidInputError, match=r"^inputs\[45\]: bad$") as caught:
        taken.extend(client.stream("sentence-order", pairs(200)))
    assert caught.value.input_index == 45
    assert numbers_of(taken) == list(range(45))


def test_errors_take_the_places_of_refused_rows(scripted: MakeService) -> None:
    bad = {0, 45, 46, 63, 64, 199}
    rows: list[Any] = pairs(200)
    rows[100] = {"text": "100"}
    client, _ = scripted(refusing(*bad), max_items=7)
    answers = list(client.with_errors("sentence-order", rows))
    errors = {index for index, answer in enumerate(answers) if isinstance(answer, Exception)}
    assert errors == bad | {100}
    assert all(answers[index].input_index == index for index in errors)
    assert "inputs[100].text_pair is missing" in str(answers[100])
    rest = [answer for index, answer in enumerate(answers) if index not in errors]
    assert numbers_of(rest) == [number for number in range(200) if number not in errors]


def test_an_error_of_the_rows_comes_after_their_answers(scripted: MakeService) -> None:
    def broken() -> Iterator[dict[str, str]]:
        yield from pairs(70)
        raise OSError("the file is truncated")

    client, _ = scripted(max_items=100)
    taken: list[Any] = []
    with pytest.raises(OSError, match="is truncated"):
        taken.extend(client.stream("sentence-order", broken()))
    assert numbers_of(taken) == list(range(70))
    assert list(client.stream("sentence-order", [])) == []


def test_what_is_no_fault_of_a_row_ends_the_stream(scripted: MakeService) -> None:
    def answer(numbers: list[int]) -> tuple[int, Any]:
        if 40 in numbers:
            return 401, {"error": "no key", "error_type": "unauthorized"}
        return orders(numbers)

    client, service = scripted(answer, max_items=100)
    with pytest.raises(UnauthorizedError, match="no key"):
        list(client.with_errors("sentence-order", pairs(500)))
    assert sum(map(len, service.sent)) < 400
    with pytest.raises(InvalidInputError, match="Unknown field 'topk'"):
        list(client.with_errors("sentence-order", pairs(5), topk=1))


@pytest.mark.parametrize("rows", ["a text", {"text": "a"}])
def test_rows_that_are_one_input_are_refused(scripted: MakeService, rows: Any) -> None:
    client, service = scripted()
    with pytest.raises(InvalidInputError, match=r"has the type \w+\. Pass an iterable"):
        list(client.stream("text-classification", rows))
    with pytest.raises(InvalidInputError, match=r"^inputs\[0\] must be a"):
        list(client.stream("sentence-order", ["It rained.", "We stayed in."]))
    assert service.sent == []


def test_nothing_is_sent_after_a_stream_is_closed(scripted: MakeService, kind: str) -> None:
    """And what is under way is cancelled in asyncio."""
    is_closed = threading.Event()

    def answer(numbers: list[int]) -> tuple[int, Any]:
        assert service.wait_until_open(2) if 0 in numbers else is_closed.wait(20)
        return orders(numbers)

    client, service = scripted(answer, max_items=100, max_concurrency=2)
    answers = client.stream("sentence-order", pairs(1000))
    assert numbers_of([next(answers)]) == [0]
    answers.close()
    is_closed.set()
    assert len(service.sent) <= 3
    assert (service.num_cancelled > 0) == (kind == "async")


@pytest.mark.parametrize("is_plain", [True, False])
def test_other_tasks_run_while_rows_are_read(is_plain: bool) -> None:
    turns = []

    def rows() -> Iterator[dict[str, str]]:
        for pair in pairs(200):
            turns.append(next(num_turns))
            yield pair

    async def async_rows() -> AsyncIterator[dict[str, str]]:
        for row in rows():
            yield row

    async def take_turns() -> None:
        while next(num_turns):
            await asyncio.sleep(0)

    async def run() -> list[int]:
        http = Scripted(orders, max_items=100).http_client("async")
        async with AsyncAlbertClient(URL, http_client=http) as client:
            other = asyncio.create_task(take_turns())
            source = rows() if is_plain else async_rows()
            answers = [answer async for answer in client.stream("sentence-order", source)]
            other.cancel()
        return numbers_of(answers)

    num_turns = itertools.count(1)
    assert asyncio.run(run()) == list(range(200))
    assert all(second - first > 1 for first, second in itertools.pairwise(turns))
