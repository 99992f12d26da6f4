"""docs/operate.md has the messages, the settings and the status of each limit."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.requests import Request as HttpRequest

from albert_serve.api.schemas import FillMaskRequest
from albert_serve.errors import RequestError
from albert_serve.server.bodies import BodyBudget, read_body
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


def fill_queue() -> None:
    async def run() -> None:
        batcher = make_batcher(FakeEngine(), max_queue_tokens=100)
        calls = [batcher.run([make_input([1] * 60)], 10.0) for _ in range(2)]
        await asyncio.gather(*calls)

    asyncio.run(run())


def exceed_queue() -> None:
    class Long:
        def prepare(self, item: str, parameters: object) -> Prepared[None]:
            return Prepared(inputs=[make_input([1] * 101)], finish=lambda _: None)

    prepare_request(Long(), FillMaskRequest(inputs="a"), max_tokens=100)


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
    budget = BodyBudget(10_000)
    with budget.body() as first, budget.body() as second:
        first(6_000)
        second(5_000)


REFUSALS: list[tuple[str, Callable[[], None]]] = [
    ("large bodies", send_large_bodies),
    ("queue tokens", fill_queue),
    ("queue tokens", exceed_queue),
    ("deadline", miss_deadline),
    ("deadline", send_slowly),
]


def test_the_table_has_a_row_for_each_refusal() -> None:
    concurrency, *others = (row["limit"] for row in rows())  # test_concurrency_gate.py has it
    assert concurrency == "concurrency"
    assert others == [limit for limit, _ in REFUSALS]


@pytest.mark.parametrize("number", range(len(REFUSALS)), ids=lambda number: REFUSALS[number][0])
def test_a_refusal_is_as_the_table_says(number: int) -> None:
    row, (_, refuse) = rows()[number + 1], REFUSALS[number]
    with pytest.raises(RequestError) as caught:
        refuse()
    error = caught.value
    assert (str(int(error.status)), error.error_type) == (row["status"], row["kind"])
    assert without_numbers(str(error)) == without_numbers(row["text"])


def test_the_defaults_are_those_of_the_settings() -> None:
    settings, page = Settings(bundle=Path("bundle")), PAGE.read_text(encoding="utf-8")
    assert f"`ALBERT_SERVE_MAX_CONCURRENCY` ({settings.max_concurrency})" in page
    assert f"`ALBERT_SERVE_MAX_QUEUE_TOKENS` ({settings.max_queue_tokens})" in page
    assert f"`ALBERT_SERVE_DEADLINE_S` ({settings.deadline_s:g})" in page
