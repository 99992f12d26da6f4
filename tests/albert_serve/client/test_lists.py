"""Long lists and streams: their split into several requests, and the errors of their items."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from albert_serve.api import wire
from albert_serve.errors import BodyTooLargeError, InvalidInputError, NoMaskError, UnauthorizedError
from tests.albert_serve.client.support import (
    Answer,
    MakeClient,
    MakeService,
    answer_pairs,
    client_with_responses,
    error_response,
    limits,
    numbers_of,
    pairs,
)
from tests.albert_serve.support import MAX_ITEMS, RunningService


def replies(*numbers: int) -> httpx.Response:
    return httpx.Response(200, json=answer_pairs([*numbers])[1])


def sent_numbers(requests: list[httpx.Request]) -> list[list[int]]:
    """Return the numbers of the pairs in each request that has a body."""
    bodies = [json.loads(request.content) for request in requests if request.content]
    return [[int(item["text"]) for item in body["inputs"]] for body in bodies]


def test_a_long_list_is_split_into_requests_that_the_service_accepts() -> None:
    client, received = client_with_responses(
        limits(2), replies(0, 1), replies(2, 3), replies(4), replies(0, 1)
    )
    assert numbers_of(client.sentence_order(pairs(5))) == [0, 1, 2, 3, 4]
    assert [request.url.path for request in received] == ["/info", *["/sentence-order"] * 3]
    assert sent_numbers(received) == [[0, 1], [2, 3], [4]]
    client.sentence_order(pairs(2))
    assert len(received) == 5  # the client requests the limits only once


def test_a_list_may_have_more_items_than_the_schema_of_a_request_allows() -> None:
    responses = [limits(wire.MAX_ITEMS, 1 << 30), replies(*[0] * wire.MAX_ITEMS), replies(1, 1)]
    client, received = client_with_responses(*responses, timeout_s=600.0)
    answers = client.sentence_order(pairs(wire.MAX_ITEMS + 2))
    assert numbers_of(answers) == [0] * wire.MAX_ITEMS + [1, 1]
    assert [len(numbers) for numbers in sent_numbers(received)] == [wire.MAX_ITEMS, 2]
    invalid: Any = {"text": 1}
    with pytest.raises(InvalidInputError, match=rf"^inputs\[{wire.MAX_ITEMS + 1}\]"):
        client.sentence_order([*pairs(wire.MAX_ITEMS + 1), invalid])


def test_requests_are_as_large_as_the_limit_of_bytes_allows() -> None:
    item_bytes = len(json.dumps(pairs(1, length=80)[0])) + 1  # one more for the comma
    frame_bytes = len(json.dumps({"inputs": [], "parameters": {}}))
    for max_body_bytes, expected in (
        (frame_bytes + 2 * item_bytes, [[0, 1], [2, 3], [4]]),
        (frame_bytes + 2 * item_bytes - 1, [[0], [1], [2], [3], [4]]),
    ):
        answers = [replies(*numbers) for numbers in expected]
        client, received = client_with_responses(limits(100, max_body_bytes), *answers)
        client.sentence_order(pairs(5, length=80))
        assert sent_numbers(received) == expected
        assert all(len(request.content) <= max_body_bytes for request in received[1:])


def test_a_list_that_is_too_large_for_one_request_is_halved() -> None:
    too_much = [error_response(422, "too_much_at_once"), error_response(413, "body_too_large")]
    client, received = client_with_responses(
        limits(100), *too_much, replies(1), replies(2), replies(3, 4, 5)
    )
    assert numbers_of(client.sentence_order(pairs(5))) == [1, 2, 3, 4, 5]
    assert sent_numbers(received) == [[0, 1, 2, 3, 4], [0, 1], [0], [1], [2, 3, 4]]


def test_the_error_of_an_item_has_its_index_in_the_complete_list() -> None:
    two_errors = error_response(422, "no_mask", error="inputs[1]: bad; inputs[0]: inputs[0]")
    client, received = client_with_responses(limits(2), replies(0, 0), two_errors)
    message = r"^inputs\[3\]: bad; inputs\[2\]: inputs\[0\]$"
    with pytest.raises(NoMaskError, match=message) as caught:
        client.sentence_order(pairs(4))
    assert caught.value.request_id == "r1"
    assert sent_numbers(received) == [[0, 1], [2, 3]]
    # The last pair exceeds the limit of bytes by itself.
    too_large = error_response(413, "body_too_large")
    client, received = client_with_responses(limits(100, 50), *[replies(0)] * 3, too_large)
    with pytest.raises(BodyTooLargeError, match=r"^inputs\[3\]: no$"):
        client.sentence_order(pairs(4, length=40))
    assert sent_numbers(received) == [[0], [1], [2], [3]]
    client, _ = client_with_responses(error_response(413, "body_too_large"))
    with pytest.raises(BodyTooLargeError, match=r"^no$"):
        client.sentence_order(pairs(1)[0])


@pytest.mark.parametrize(
    ("num_pairs", "options", "limit"), [(21, {"max_concurrency": 1}, 1), (21, {}, 8), (4, {}, 2)]
)
def test_concurrent_requests_stay_within_the_limit_and_answers_keep_their_order(
    fake_service: MakeService, num_pairs: int, options: dict[str, int], limit: int
) -> None:
    def answer(numbers: list[int]) -> tuple[int, Any]:
        assert service.wait_for(lambda: service.max_open >= limit)
        time.sleep(0.01 * (numbers[0] % 3))  # later requests may end first
        return answer_pairs(numbers)

    client, service = fake_service(answer, max_items=2, **options)
    assert numbers_of(client.sentence_order(pairs(num_pairs))) == list(range(num_pairs))
    assert service.max_open == limit
    assert sorted(itertools.chain(*service.requests)) == list(range(num_pairs))


def test_a_part_is_retried_without_limit_while_other_parts_are_answered(
    fake_service: MakeService,
) -> None:
    def answer(numbers: list[int]) -> tuple[int, Any]:
        if numbers != [0] or len(service.requests) > 3:
            return answer_pairs(numbers)
        # The third request begins when the second has been answered.
        assert service.wait_for(lambda: len(service.requests) == 3)
        return 429, {"error": "busy", "error_type": "overloaded"}

    client, service = fake_service(answer, max_concurrency=2, num_retries=0)
    assert numbers_of(client.sentence_order(pairs(3))) == [0, 1, 2]


def rejecting(*rejected: int) -> Answer:
    """Return a function that rejects requests with any of these pairs."""

    def answer(numbers: list[int]) -> tuple[int, Any]:
        for index, number in enumerate(numbers):
            if number in rejected:
                return 422, {"error": f"inputs[{index}]: bad", "error_type": "invalid_input"}
        return answer_pairs(numbers)

    return answer


def test_no_request_is_sent_after_a_failure(fake_service: MakeService) -> None:
    reject = rejecting(3)

    def answer(numbers: list[int]) -> tuple[int, Any]:
        time.sleep(0.3 if 0 in numbers else 0)  # the first answer arrives after the failure
        return reject(numbers)

    client, service = fake_service(answer, max_items=1, max_concurrency=2)
    with pytest.raises(InvalidInputError, match=r"^inputs\[3\]: bad$") as caught:
        client.sentence_order(pairs(200))
    assert caught.value.input_index == 3
    assert len(service.requests) == 4


def test_a_running_service_answers_a_stream_of_many_rows(
    make_client: MakeClient, service: RunningService
) -> None:
    texts = [f"The {'e ' * (number % 40)}[MASK] was born." for number in range(5 * MAX_ITEMS)]
    texts[70] = "no mask"
    texts[MAX_ITEMS] = 3  # type: ignore[call-overload]
    client = make_client(service.url, timeout_s=120)
    answers = list(client.with_errors("fill-mask", texts, top_k=1))
    assert len(answers) == len(texts)
    assert isinstance(answers[70], NoMaskError)
    assert str(answers[70]).startswith("inputs[70]: ")
    assert isinstance(answers[MAX_ITEMS], InvalidInputError)
    assert answers[MAX_ITEMS].input_index == MAX_ITEMS
    for index in (0, 31, 33, 69, 71, len(texts) - 1):
        [single] = client.fill_mask(texts[index], top_k=1)
        assert answers[index][0].token == single.token


def test_a_stream_reads_rows_as_its_answers_are_consumed(fake_service: MakeService) -> None:
    num_read = 0

    def endless_rows() -> Iterator[dict[str, str]]:
        nonlocal num_read
        for num_read in itertools.count(1):
            yield {"text": str(num_read - 1), "text_pair": "b"}

    def answer(numbers: list[int]) -> tuple[int, Any]:
        assert service.wait_for(lambda: service.max_open == 2)
        time.sleep(0.5 if 0 in numbers else 0)  # many later answers could wait for the first
        return answer_pairs(numbers)

    client, service = fake_service(answer, max_items=100, max_concurrency=2)
    answers = client.stream("sentence-order", endless_rows())
    assert numbers_of(list(itertools.islice(answers, 300))) == list(range(300))
    answers.close()
    assert 300 <= num_read <= 14 * 32
    assert service.max_open == 2
    assert set(map(len, service.requests)) == {32}


def test_rejected_rows_have_errors_in_place_of_answers(fake_service: MakeService) -> None:
    rejected = {0, 45, 46, 63, 64, 199}
    rows: list[Any] = pairs(200)
    rows[100] = {"text": "100"}
    client, _ = fake_service(rejecting(*rejected), max_items=7)
    answers = list(client.with_errors("sentence-order", rows))
    errors = {index for index, answer in enumerate(answers) if isinstance(answer, Exception)}
    assert errors == rejected | {100}
    assert all(answers[index].input_index == index for index in errors)
    assert "inputs[100].text_pair is missing" in str(answers[100])
    answered = [index for index in range(200) if index not in errors]
    assert numbers_of([answers[index] for index in answered]) == answered


def test_an_error_ends_the_stream_after_the_answers_before_it(fake_service: MakeService) -> None:
    """The error is about a row, or the rows' iterator raises it."""

    def broken_rows() -> Iterator[dict[str, str]]:
        yield from pairs(70)
        raise OSError("the file is truncated")

    for rejected, error, message, num_answers in (
        ([45, 50, 69], InvalidInputError, r"^inputs\[45\]: bad$", 45),
        ([], OSError, "the file is truncated", 70),
    ):
        client, _ = fake_service(rejecting(*rejected), max_items=100)
        answers: list[Any] = []
        with pytest.raises(error, match=message):
            answers.extend(client.stream("sentence-order", broken_rows()))
        assert numbers_of(answers) == list(range(num_answers))
    assert list(client.stream("sentence-order", [])) == []


def test_an_error_that_no_row_caused_ends_the_stream(fake_service: MakeService) -> None:
    def answer(numbers: list[int]) -> tuple[int, Any]:
        unauthorized = 401, {"error": "no key", "error_type": "unauthorized"}
        return unauthorized if 40 in numbers else answer_pairs(numbers)

    client, service = fake_service(answer, max_items=100)
    with pytest.raises(UnauthorizedError, match="no key"):
        list(client.with_errors("sentence-order", pairs(500)))
    assert sum(map(len, service.requests)) < 400
    with pytest.raises(InvalidInputError, match="Unknown field 'topk'"):
        list(client.with_errors("sentence-order", pairs(5), topk=1))
    with pytest.raises(InvalidInputError, match="rows has the type str"):
        client.stream("sentence-order", "one string")


def test_nothing_is_sent_after_a_stream_is_closed(fake_service: MakeService, kind: str) -> None:
    """With asyncio, open requests are cancelled too."""
    is_closed = threading.Event()

    def answer(numbers: list[int]) -> tuple[int, Any]:
        assert service.wait_for(lambda: service.max_open == 2)
        assert 0 in numbers or is_closed.wait(20)
        return answer_pairs(numbers)

    client, service = fake_service(answer, max_items=100, max_concurrency=2)
    answers = client.stream("sentence-order", pairs(1000))
    assert numbers_of([next(answers)]) == [0]
    answers.close()
    is_closed.set()
    assert len(service.requests) <= 3
    assert (service.num_cancelled > 0) == (kind == "async")


@pytest.mark.parametrize("kind", ["async"])
def test_an_async_stream_takes_an_async_iterator(fake_service: MakeService) -> None:
    async def rows() -> AsyncIterator[dict[str, str]]:
        for row in pairs(200):
            yield row

    client, _ = fake_service(max_items=100)
    assert numbers_of(list(client.stream("sentence-order", rows()))) == list(range(200))
