"""Long lists and streams: the parts in which they are sent, and the errors of their items."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest

from albert_serve.api import wire
from albert_serve.client import AsyncAlbertClient
from albert_serve.errors import (
    BodyTooLargeError,
    InvalidInputError,
    NoMaskError,
    RequestError,
    UnauthorizedError,
)
from tests.albert_serve.client import twins
from tests.albert_serve.client.twins import (
    URL,
    Answer,
    Scripted,
    Twin,
    numbers_of,
    orders,
    pairs,
    refusal,
    refused,
    replying,
)
from tests.albert_serve.support import MAX_ITEMS, Running

MakeService = Callable[..., tuple[Any, Scripted]]


def limits(max_items: int, max_body_bytes: int = 10**6) -> httpx.Response:
    return httpx.Response(200, json=twins.limits(max_items, max_body_bytes))


def replies(*numbers: int) -> httpx.Response:
    return httpx.Response(200, json=orders([*numbers])[1])


def sent(requests: list[httpx.Request]) -> list[list[int]]:
    """The numbers of the pairs in each request but that for the limits."""
    bodies = [json.loads(request.content) for request in requests if request.content]
    return [[int(item["text"]) for item in body["inputs"]] for body in bodies]


def test_a_long_list_goes_in_parts_that_the_service_takes() -> None:
    client, received = replying(limits(2), replies(0, 1), replies(2, 3), replies(4), replies(0, 1))
    assert numbers_of(client.sentence_order(pairs(5))) == [0, 1, 2, 3, 4]
    assert [request.url.path for request in received] == ["/info", *["/sentence-order"] * 3]
    assert sent(received) == [[0, 1], [2, 3], [4]]
    client.sentence_order(pairs(2))
    assert len(received) == 5  # the limits are known now


def test_a_list_may_be_longer_than_any_request() -> None:
    most = wire.MAX_ITEMS
    responses = [limits(most, 1 << 30), replies(*[0] * most), replies(1, 1)]
    client, received = replying(*responses, timeout_s=600.0)
    assert numbers_of(client.sentence_order(pairs(most + 2))) == [0] * most + [1, 1]
    assert [len(part) for part in sent(received)] == [most, 2]


def test_parts_are_as_large_as_the_limit_of_bytes() -> None:
    item = len(json.dumps(pairs(1, length=80)[0])) + 1  # and a comma
    frame = len(json.dumps({"inputs": [], "parameters": {}}))
    for max_body_bytes, expected in (
        (frame + 2 * item, [[0, 1], [2, 3], [4]]),
        (frame + 2 * item - 1, [[0], [1], [2], [3], [4]]),
    ):
        answers = [replies(*numbers) for numbers in expected]
        client, received = replying(limits(100, max_body_bytes), *answers)
        client.sentence_order(pairs(5, length=80))
        assert sent(received) == expected
        assert all(len(request.content) <= max_body_bytes for request in received[1:])


def test_a_list_that_is_too_much_at_once_is_halved() -> None:
    too_much = [refusal(422, "too_much_at_once"), refusal(413, "body_too_large")]
    client, received = replying(limits(100), *too_much, replies(1), replies(2), replies(3, 4))
    assert numbers_of(client.sentence_order(pairs(4))) == [1, 2, 3, 4]
    assert sent(received) == [[0, 1, 2, 3], [0, 1], [0], [1], [2, 3]]


TWO_ERRORS = "inputs[1]: bad; inputs[0]: inputs[0]"


@pytest.mark.parametrize(
    ("responses", "error", "message", "parts"),
    [
        (
            [limits(2), replies(0, 0), refusal(422, "no_mask", error=TWO_ERRORS)],
            NoMaskError,
            r"^inputs\[3\]: bad; inputs\[2\]: inputs\[0\]$",
            [[0, 1], [2, 3]],
        ),
        (  # the last is over the limit of bytes by itself
            [limits(100, 50), *[replies(0)] * 3, refusal(413, "body_too_large")],
            BodyTooLargeError,
            r"^inputs\[3\]: no$",
            [[0], [1], [2], [3]],
        ),
    ],
)
def test_an_item_that_is_refused_has_its_index_in_the_whole_list(
    responses: list[httpx.Response],
    error: type[RequestError],
    message: str,
    parts: list[list[int]],
) -> None:
    client, received = replying(*responses)
    with pytest.raises(error, match=message) as caught:
        client.sentence_order(pairs(4, length=40))
    assert caught.value.request_id == "r1"
    assert sent(received) == parts


@pytest.mark.parametrize("limit", [1, 4])
def test_parts_are_sent_at_once_up_to_the_limit_and_keep_their_order(
    scripted: MakeService, limit: int
) -> None:
    def answer(numbers: list[int]) -> tuple[int, Any]:
        assert service.wait_until_open(limit)
        time.sleep(0.01 * (numbers[0] % 3))  # so that they end in another order
        return orders(numbers)

    client, service = scripted(answer, max_items=2, max_concurrency=limit)
    assert numbers_of(client.sentence_order(pairs(21))) == list(range(21))
    assert service.max_open == limit
    assert sorted(itertools.chain(*service.sent)) == list(range(21))


def test_nothing_begins_after_a_failure(scripted: MakeService) -> None:
    def answer(numbers: list[int]) -> tuple[int, Any]:
        return refused(0) if numbers == [3] else orders(numbers)

    client, service = scripted(answer, max_concurrency=2)
    with pytest.raises(InvalidInputError, match=r"^inputs\[3\]: bad$") as caught:
        client.sentence_order(pairs(200))
    assert caught.value.input_index == 3
    assert len(service.sent) < 20


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


def test_an_async_stream_takes_an_async_iterator() -> None:
    async def rows() -> AsyncIterator[dict[str, str]]:
        for row in pairs(200):
            yield row

    async def run() -> list[Any]:
        http = Scripted(orders, max_items=100).http_client("async")
        async with AsyncAlbertClient(URL, http_client=http) as client:
            return [answer async for answer in client.stream("sentence-order", rows())]

    assert numbers_of(asyncio.run(run())) == list(range(200))
