"""Lists are sent with bounded concurrency: their order, their errors, and what is cancelled."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextvars import ContextVar
from typing import Any

import httpx
import pytest

from albert_serve.client import AlbertClient, requests
from albert_serve.client.server import Server
from albert_serve.client.sync_io import _Workers
from albert_serve.client.transport import Exchange, Progress, Received, Send, Wait
from albert_serve.errors import InvalidInputError, QueueFullError, RequestError
from tests.albert_serve.client.twins import (
    Scripted,
    Twin,
    numbers_of,
    orders,
    pairs,
    refused,
    scripted,
)
from tests.albert_serve.support import ROOT

MakeTwin = Callable[..., Twin]


@pytest.fixture(params=["sync", "async"])
def twin(request: pytest.FixtureRequest) -> Iterator[MakeTwin]:
    made: list[Twin] = []

    def make(service: Scripted, **options: Any) -> Twin:
        made.append(Twin(request.param, service.url, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("limit", [1, 4])
def test_parts_are_sent_at_once_up_to_the_limit_and_keep_their_order(
    twin: MakeTwin, limit: int
) -> None:
    def answer(numbers: list[int]) -> tuple[int, Any]:
        assert service.wait_until_open(limit)
        time.sleep(0.01 * (numbers[0] % 3))  # so that they end in another order
        return orders(numbers)

    with scripted(answer, max_items=2) as service:
        client = twin(service, max_concurrency=limit)
        assert numbers_of(client.call("sentence_order", pairs(21))) == list(range(21))
        assert service.max_open == limit
        assert sorted(itertools.chain(*service.sent)) == list(range(21))


def test_nothing_begins_after_a_failure_and_its_index_is_that_of_the_whole_list(
    twin: MakeTwin,
) -> None:
    def answer(numbers: list[int]) -> tuple[int, Any]:
        return refused(0) if numbers == [3] else orders(numbers)

    with scripted(answer) as service:
        client = twin(service, max_concurrency=2)
        with pytest.raises(InvalidInputError, match=r"^inputs\[3\]: bad$") as caught:
            client.call("sentence_order", pairs(200))
        assert caught.value.input_index == 3
        assert len(service.sent) < 20


def test_the_error_is_the_one_that_came_first_in_the_list(twin: MakeTwin) -> None:
    second_refused = threading.Event()

    def answer(numbers: list[int]) -> tuple[int, Any]:
        if numbers == [0]:
            assert second_refused.wait(10)
            time.sleep(0.05)
        elif numbers == [1]:
            second_refused.set()
        return refused(0)

    with scripted(answer) as service:
        client = twin(service, max_concurrency=2)
        with pytest.raises(InvalidInputError, match=r"^inputs\[0\]"):
            client.call("sentence_order", pairs(9))
        assert sorted(service.sent) == [[0], [1]]


def test_a_failure_closes_the_connections_of_what_is_under_way(twin: MakeTwin) -> None:
    over = threading.Event()

    def answer(numbers: list[int]) -> tuple[int, Any]:
        if numbers == [0]:
            assert service.wait_until_open(2)
            return refused(0)
        assert over.wait(20)
        return orders(numbers)

    with scripted(answer) as service:
        client = twin(service, max_concurrency=2)
        with pytest.raises(InvalidInputError):
            client.call("sentence_order", pairs(2))
        assert service.num_open == 1  # it was not waited for
        over.set()
        assert service.gone.wait(10)


def test_a_wait_for_a_retry_ends_with_a_failure(twin: MakeTwin) -> None:
    def answer(numbers: list[int]) -> tuple[int, Any]:
        assert service.wait_until_open(2)
        if numbers == [1]:
            return 503, {"error": "starting", "error_type": "not_ready"}
        time.sleep(0.1)
        return refused(0)

    with scripted(answer) as service:
        client = twin(service, max_concurrency=2, num_retries=50, timeout_s=30)
        with pytest.raises(InvalidInputError, match=r"^inputs\[0\]"):
            client.call("sentence_order", pairs(2))
        num_sent = len(service.sent)
        time.sleep(0.5)
        assert len(service.sent) <= num_sent + 1


def test_what_comes_before_a_failure_still_begins() -> None:
    """A thread may take a function, and be overtaken before it calls it."""
    workers = _Workers(1)
    with pytest.raises(ZeroDivisionError):
        workers._call(2, divmod, 1, 0)
    assert workers._call(1, divmod, 7, 2) == (3, 1)
    with pytest.raises(CancelledError):
        workers._call(3, divmod, 7, 2)
    with pytest.raises(ZeroDivisionError):
        workers._call(0, divmod, 1, 0)
    with pytest.raises(CancelledError):
        workers._call(1, divmod, 7, 2)


def test_each_request_is_sent_in_the_callers_context() -> None:
    trace: ContextVar[str] = ContextVar("trace", default="none")
    seen: list[str] = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(trace.get())
        if request.url.path == "/info":
            return httpx.Response(200, json={**limits, "max_items": 1})
        return httpx.Response(200, json=[{"in_order": 0.5}])

    with scripted() as service:
        limits = service.limits
    trace.set("caller's")
    with httpx.Client(transport=httpx.MockTransport(handle)) as http:
        AlbertClient("http://service.test", http_client=http).sentence_order(pairs(5))
    assert seen == ["caller's"] * 6


INTERRUPTED = """
import sys
from albert_serve.client import AlbertClient

with AlbertClient(sys.argv[1], timeout_s=600) as client:
    pairs = [{"text": str(number), "text_pair": "b"} for number in range(20)]
    if sys.argv[2] == "list":
        client.sentence_order(pairs)
    else:
        list(client.sentence_order_stream(pairs))
"""


@pytest.mark.parametrize("kind", ["list", "stream"])
def test_an_interrupted_program_ends_without_waiting_for_replies(kind: str) -> None:
    over = threading.Event()

    def answer(numbers: list[int]) -> tuple[int, Any]:
        if kind == "list" or numbers != [0]:
            over.wait(60)
        return orders(numbers)

    with scripted(answer) as service:
        process = subprocess.Popen(
            [sys.executable, "-c", INTERRUPTED, service.url, kind],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            with service.changed:
                expected = 8 if kind == "list" else 1
                assert service.changed.wait_for(lambda: service.num_open >= expected, timeout=60)
            time.sleep(0.2)  # the main thread waits as well
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=30)
        finally:
            process.kill()
            process.wait()
            over.set()
    assert errors.rstrip().endswith("KeyboardInterrupt"), errors
    assert process.returncode != 0


def exchange() -> Exchange:
    server = Server.at(
        "http://service.test",
        model=None,
        api_key="",
        timeout_s=60,
        num_retries=2,
        max_concurrency=8,
        max_reply_bytes=1 << 20,
    )
    return Exchange(server)


def test_a_refusal_is_not_counted_while_other_parts_are_answered() -> None:
    call = requests.sentence_order(pairs(1), {})
    overloaded = Received(url="", status=429, headers={"Retry-After": "0"}, content=b"")
    progress = Progress()
    conversation = exchange().converse_in_turn(call, None, progress)
    next(conversation)
    for _ in range(20):
        assert isinstance(conversation.send(overloaded), Wait)
        progress.num_answered += 1
        assert isinstance(conversation.send(None), Send)
    for _ in range(3):
        assert isinstance(conversation.send(overloaded), Wait)
        assert isinstance(conversation.send(None), Send)
    with pytest.raises(QueueFullError):
        conversation.send(overloaded)


@pytest.mark.parametrize(
    ("status", "num_earlier", "num_during"),
    [
        pytest.param(429, 7, 0, id="answered before"),
        pytest.param(503, 0, 1, id="not overloaded"),
    ],
)
def test_other_refusals_are_counted(status: int, num_earlier: int, num_during: int) -> None:
    call = requests.sentence_order(pairs(1), {})
    refusal = Received(url="", status=status, headers={"Retry-After": "0"}, content=b"")
    progress = Progress(num_answered=num_earlier)
    conversation = exchange().converse_in_turn(call, None, progress)
    next(conversation)
    for _ in range(2):
        assert isinstance(conversation.send(refusal), Wait)
        progress.num_answered += num_during
        assert isinstance(conversation.send(None), Send)
    with pytest.raises(RequestError):
        conversation.send(refusal)
