"""The page of the tasks: its commands, parameters and defaults are those of the service."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from albert_serve.tasks import TASKS
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
