"""The page of each task: its commands work as printed, its parameters are those of the schema."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from albert_serve.tasks import TASKS
from tests.albert_serve.support import Running

DOCS = Path(__file__).resolve().parents[4] / "docs"
ADDRESS = "http://127.0.0.1:3000"
PAGES = {
    task: (DOCS / f"{task}.md").read_text(encoding="utf-8")
    for task in (
        *("fill-mask", "text-classification", "question-answering", "sentence-order"),
        "multiple-choice",
    )
}
EXAMPLE = re.compile(r"```sh\n(?P<command>curl .*?)```\n+```json\n(?P<reply>.*?)```", re.DOTALL)
PARAMETER = re.compile(r"^\| `(?P<name>\w+)` \| (?P<default>.+?) \|", re.MULTILINE)
EXAMPLES = [
    pytest.param(task, example, id=f"{task} {number}")
    for task, page in PAGES.items()
    for number, example in enumerate(EXAMPLE.finditer(page))
]


def section(page: str, title: str) -> str:
    """The text below a heading."""
    return page.split(f"\n## {title}", 1)[1].split("\n## ", 1)[0]


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
    listed = {
        match["name"]: match["default"]
        for match in PARAMETER.finditer(section(PAGES[task], "Parameters"))
    }
    fields = TASKS[task].parameters.model_json_schema()["properties"]
    assert set(listed) == set(fields)
    for name, default in listed.items():
        value = fields[name].get("default")
        assert default.strip("`") == ("none" if value is None else json.dumps(value)), name


def test_the_parameters_of_embeddings_are_listed() -> None:
    page = section((DOCS / "embeddings.md").read_text(encoding="utf-8"), "Hugging Face's format")
    listed = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert set(listed) == set(TASKS["feature-extraction"].parameters.model_fields)


def test_the_message_of_a_long_text_is_the_services(client: httpx.Client) -> None:
    told = section(PAGES["text-classification"], "Long texts")
    [message] = re.findall(r"^    (the text is .*)$", told, re.MULTILINE)
    reply = client.post("/text-classification", json={"inputs": "a " * 300})
    pattern = re.sub(r"\d+", r"\\d+", re.escape(message))
    assert re.fullmatch(pattern, reply.json()["error"])


def test_the_readme_lists_every_document() -> None:
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    documents = {file.name for file in DOCS.glob("*.md")}
    assert documents <= set(re.findall(r"\(docs/([\w-]+\.md)\)", readme))
