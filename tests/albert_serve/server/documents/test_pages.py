"""The pages of the tasks and of limits: commands, parameters, messages and defaults are so."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request as HttpRequest

from albert_serve.api.schemas import FillMaskRequest
from albert_serve.errors import RequestError
from albert_serve.server.bodies import BodyBudget, read_body
from albert_serve.settings import Settings
from albert_serve.tasks import TASKS, Prepared, prepare_request
from tests.albert_serve.batching.engines import FakeEngine, make_batcher, make_input
from tests.albert_serve.support import ROOT, Running

PAGE = (ROOT / "docs/tasks.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:3000"


def section(page: str, title: str) -> str:
    """The text below a heading, up to the next one of its level."""
    [(level, start)] = re.findall(rf"^(#+) {title}\n([\s\S]*)", page, re.MULTILINE)
    return re.split(rf"^#{{1,{len(level)}}} ", str(start), maxsplit=1, flags=re.MULTILINE)[0]


PAGES = {
    task: section(PAGE, task.replace("-", " ").capitalize().replace("Fill mask", "Fill-mask"))
    for task in TASKS
    if task != "feature-extraction"
}
EXAMPLE = re.compile(r"```sh\n(?P<command>curl .*?)```\n+```json\n(?P<reply>.*?)```", re.DOTALL)
PARAMETER = re.compile(r"^\| `(?P<name>\w+)` \| (?P<default>.+?) \|", re.MULTILINE)
EXAMPLES = [
    pytest.param(task, example, id=f"{task} {number}")
    for task, page in PAGES.items()
    for number, example in enumerate(EXAMPLE.finditer(page))
]


def shape(value: Any) -> Any:
    """The keys, lengths and types of a reply, without its words and figures."""
    if isinstance(value, dict):
        return {name: shape(each) for name, each in value.items()}
    if isinstance(value, list):
        return [shape(each) for each in value]
    return type(value)


@pytest.mark.parametrize(("task", "example"), EXAMPLES)
def test_a_command_works_as_printed(
    task: str, example: re.Match[str], service_of: Callable[[str], Running]
) -> None:
    command = example["command"].replace(ADDRESS, service_of(task).url)
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, check=True, timeout=60, text=True
    )
    assert shape(json.loads(done.stdout)) == shape(json.loads(example["reply"]))


@pytest.mark.parametrize("task", PAGES)
def test_the_parameters_have_their_defaults(task: str) -> None:
    listed = {match["name"]: match["default"] for match in PARAMETER.finditer(PAGES[task])}
    fields = TASKS[task].parameters.model_json_schema()["properties"]
    assert {*listed, "truncation"} == set(fields)  # "Long texts" has truncation, for all tasks
    for name, default in listed.items():
        value = fields[name].get("default")
        assert default.strip("`") == ("none" if value is None else json.dumps(value)), name


def test_the_parameters_of_embeddings_are_listed() -> None:
    page = section(PAGE, "Hugging Face's format")
    listed = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert {*listed, "truncation"} == set(TASKS["feature-extraction"].parameters.model_fields)


def test_the_message_of_a_long_text_is_the_services(client: httpx.Client) -> None:
    told = section(PAGE, "Long texts")
    [message] = re.findall(r"^    (the text is .*)$", told, re.MULTILINE)
    reply = client.post("/text-classification", json={"inputs": "a " * 300})
    pattern = re.sub(r"\d+", r"\\d+", re.escape(message))
    assert re.fullmatch(pattern, reply.json()["error"])


LIMITS_PAGE = ROOT / "docs/operate.md"
ROW = re.compile(
    r"^\| (?P<limit>[\w ]+) \|.*\| (?P<status>\d+), `(?P<kind>\w+)` \| `(?P<text>.+)` \|$"
)


def rows() -> list[re.Match[str]]:
    lines = LIMITS_PAGE.read_text(encoding="utf-8").splitlines()
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
    settings, page = Settings(bundle=Path("bundle")), LIMITS_PAGE.read_text(encoding="utf-8")
    assert f"`ALBERT_SERVE_MAX_CONCURRENCY` ({settings.max_concurrency})" in page
    assert f"`ALBERT_SERVE_MAX_QUEUE_TOKENS` ({settings.max_queue_tokens})" in page
    assert f"`ALBERT_SERVE_DEADLINE_S` ({settings.deadline_s:g})" in page
