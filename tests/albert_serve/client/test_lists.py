"""Long lists: the parts in which they are sent, at once, and the errors of their items."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from albert_serve.api import wire
from albert_serve.errors import (
    BodyTooLargeError,
    InvalidInputError,
    NoMaskError,
    NotReadyError,
    RequestError,
)
from tests.albert_serve.client import twins
from tests.albert_serve.client.twins import (
    Scripted,
    numbers_of,
    orders,
    pairs,
    refusal,
    refused,
    replying,
)
from tests.albert_serve.support import ROOT

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
    client, received = replying(
        limits(2), replies(0, 1), replies(2, 3), replies(4), replies(0, 1), replies(5)
    )
    assert numbers_of(client.sentence_order(pairs(5))) == [0, 1, 2, 3, 4]
    assert [request.url.path for request in received] == ["/info", *["/sentence-order"] * 3]
    assert sent(received) == [[0, 1], [2, 3], [4]]
    client.sentence_order(pairs(2))
    assert len(received) == 5  # the limits are known now
    client, received = replying(replies(5), limits(1), replies(0), replies(1))
    assert numbers_of(client.sentence_order(pairs(1))) == [5]
    assert len(received) == 1  # a list of one needs no limits
    client.sentence_order(pairs(2))
    assert sent(received) == [[0], [0], [1]]
    with pytest.raises(InvalidInputError, match="must have at least 1 item"):
        client.sentence_order([])


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
        (
            [limits(100), *[refusal(422, "too_much_at_once", error="inputs[0]: long")] * 3],
            InvalidInputError,
            r"^inputs\[0\]: long$",
            [[0, 1, 2, 3], [0, 1], [0]],
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


@pytest.mark.parametrize(("num_inputs", "num_answers"), [(3, 1), (3, 9), (1, 0)])
def test_inputs_and_answers_are_as_many(num_inputs: int, num_answers: int) -> None:
    client, _ = replying(*[limits(100)] * (num_inputs > 1), replies(*[0] * num_answers))
    with pytest.raises(RequestError, match=f"to {num_inputs} inputs with {num_answers} answers"):
        client.sentence_order(pairs(num_inputs))


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


def test_a_429_is_no_retry_while_other_parts_are_answered(scripted: MakeService) -> None:
    status, num_answered = 429, 0

    def answer(numbers: list[int]) -> tuple[int, Any]:
        nonlocal num_answered
        if numbers != [0]:
            num_answered += 1
        elif num_answered < 19:
            return status, {"error": "no", "error_type": "overloaded"}
        time.sleep(0.1)
        return orders(numbers)

    client, service = scripted(answer, max_concurrency=2, num_retries=2)
    assert numbers_of(client.sentence_order(pairs(20))) == list(range(20))
    assert service.sent.count([0]) > 3
    status, num_answered = 503, 0
    service.sent.clear()
    with pytest.raises(NotReadyError):
        client.sentence_order(pairs(20))
    assert service.sent.count([0]) == 3


INTERRUPTED = """
import sys, threading, time
import httpx
from albert_serve.api import wire
from albert_serve.client import AlbertClient
from tests.albert_serve.client.twins import limits, pairs

def handle(request):
    if request.url.path == "/info":
        return httpx.Response(200, json=limits(1))
    if threading.active_count() == 9:
        print("under way", flush=True)
    time.sleep(60)

with httpx.Client(transport=httpx.MockTransport(handle)) as http:
    AlbertClient("http://a", http_client=http, timeout_s=600).sentence_order(pairs(20))
"""


def test_an_interrupted_program_ends_without_waiting_for_replies() -> None:
    command = [sys.executable, "-c", INTERRUPTED]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "under way\n"
            time.sleep(0.2)  # the main thread waits as well
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=30)
        finally:
            process.kill()
    assert errors.rstrip().endswith("KeyboardInterrupt"), errors
    assert process.returncode != 0


def test_a_list_may_be_longer_than_any_request() -> None:
    most = wire.MAX_ITEMS
    responses = [limits(most, 1 << 30), replies(*[0] * most), replies(1, 1)]
    client, received = replying(*responses, timeout_s=600.0)
    assert numbers_of(client.sentence_order(pairs(most + 2))) == [0] * most + [1, 1]
    assert [len(part) for part in sent(received)] == [most, 2]
    with pytest.raises(InvalidInputError, match=rf"^inputs\[{most + 1}\]\.text_pair"):
        client.sentence_order([*pairs(most + 1), {"text": "a"}])
