"""docs/operate.md has the messages, the settings and the status of each limit."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.requests import Request as HttpRequest

from albert_serve.api.schemas import FillMaskRequest
from albert_serve.batching.admission import ConcurrencyLimiter, QueueAdmission
from albert_serve.batching.scheduler import QueuedRequest, Scheduler
from albert_serve.errors import RequestError
from albert_serve.server.bodies import read_body
from albert_serve.server.large_requests import LargeRequests
from albert_serve.settings import Settings
from albert_serve.tasks import Prepared, prepare_request
from tests.albert_serve.batching.engines import FakeEngine, make_batcher, make_input

PAGE = Path(__file__).resolve().parents[3] / "docs/operate.md"
ROW = re.compile(
    r"^\| (?P<limit>[\w ]+) \|.*\| (?P<status>\d+), `(?P<kind>\w+)` \| `(?P<text>.+)` \|$"
)


def rows() -> list[re.Match[str]]:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    return [match for line in lines if (match := ROW.match(line))]


def without_numbers(text: str) -> str:
    return re.sub(r"\d+(\.\d+)?(e[+-]\d+)?", "#", text)


def admission() -> QueueAdmission:
    """A queue of 100 tokens, of which 90 are taken, at a token a second."""
    scheduler: Scheduler[QueuedRequest] = Scheduler(max_batch_tokens=512, call_overhead_tokens=16)
    scheduler.add(QueuedRequest(lengths=[90], ends_s=1000.0))
    admission = QueueAdmission(scheduler, max_tokens=100)
    admission.measure(10, 10.0)
    return admission


def exceed_concurrency() -> None:
    raise ConcurrencyLimiter(0.5).refuse()


def fill_queue() -> None:
    admission().check(QueuedRequest(lengths=[11], ends_s=1000.0), 1000.0)


def exceed_queue() -> None:
    class Long:
        def prepare(self, item: str, parameters: object) -> Prepared[None]:
            return Prepared(inputs=[make_input([1] * 101)], finish=lambda _: None)

    prepare_request(Long(), FillMaskRequest(inputs="a"), max_tokens=100)


def wait_long() -> None:
    admission().check(QueuedRequest(lengths=[5], ends_s=100.0), 100.0)


def miss_deadline() -> None:
    asyncio.run(make_batcher(FakeEngine()).run([make_input([1])], 0.0))


def send_slowly() -> None:
    async def receive() -> dict[str, object]:
        await asyncio.Event().wait()
        raise AssertionError

    headers = [(b"content-type", b"application/json")]
    request = HttpRequest({"type": "http", "method": "POST", "headers": headers}, receive)
    asyncio.run(read_body(request, max_bytes=10, deadline_s=0.01, count=lambda _: None))


def send_large_bodies() -> None:
    large = LargeRequests(max_bytes=10_000)
    with large.body() as first, large.body() as second:
        first(6_000)
        second(5_000)


def send_large_requests() -> None:
    async def run() -> None:
        large = LargeRequests(max_bytes=1 << 30)
        calls = [large.read(time.sleep, 0.1, num_bytes=1 << 20, ends_s=ends_s) for _ in range(3)]
        await asyncio.gather(*calls)

    ends_s = time.monotonic() + 1.0
    asyncio.run(run())


REFUSALS: list[tuple[str, Callable[[], None]]] = [
    ("concurrency", exceed_concurrency),
    ("large bodies", send_large_bodies),
    ("large requests", send_large_requests),
    ("queue tokens", fill_queue),
    ("queue tokens", exceed_queue),
    ("wait", wait_long),
    ("deadline", miss_deadline),
    ("deadline", send_slowly),
]


def test_the_table_has_a_row_for_each_refusal() -> None:
    assert [row["limit"] for row in rows()] == [limit for limit, _ in REFUSALS]


@pytest.mark.parametrize("number", range(len(REFUSALS)), ids=lambda number: REFUSALS[number][0])
def test_a_refusal_is_as_the_table_says(number: int) -> None:
    row, (_, refuse) = rows()[number], REFUSALS[number]
    with pytest.raises(RequestError) as caught:
        refuse()
    error = caught.value
    assert (str(int(error.status)), error.error_type) == (row["status"], row["kind"])
    assert without_numbers(str(error)) == without_numbers(row["text"])


def test_the_defaults_are_those_of_the_settings() -> None:
    settings, page = Settings(bundle=Path("bundle")), PAGE.read_text(encoding="utf-8")
    assert f"`ALBERT_SERVE_MAX_WAIT_S` ({settings.max_wait_s:g})" in page
    assert f"`ALBERT_SERVE_MAX_QUEUE_TOKENS` ({settings.max_queue_tokens})" in page
    assert f"`ALBERT_SERVE_DEADLINE_S` ({settings.deadline_s:g})" in page
