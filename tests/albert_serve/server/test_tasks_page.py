"""The examples and parameters in docs/tasks.md."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from albert_serve.tasks import TASKS
from tests.albert_serve.support import ROOT, RunningService

PAGE = (ROOT / "docs/tasks.md").read_text()
ADDRESS = "http://127.0.0.1:3000"
EXAMPLE = re.compile(r"```sh\n(?P<command>curl .*?)```\n+```json\n(?P<reply>.*?)```", re.DOTALL)
PARAMETER = re.compile(r"^\| `(?P<name>\w+)` \| (?P<default>.+?) \|", re.MULTILINE)


def section(title: str) -> str:
    """Return the text below a heading, up to the next heading of its level."""
    [(level, text)] = re.findall(rf"^(#+) {title}\n([\s\S]*)", PAGE, re.MULTILINE)
    return re.split(rf"^#{{1,{len(level)}}} ", str(text), maxsplit=1, flags=re.MULTILINE)[0]


SECTIONS = {
    task: section("Fill-mask" if task == "fill-mask" else task.replace("-", " ").capitalize())
    for task in TASKS
    if task != "feature-extraction"
}
EXAMPLES = [
    pytest.param(task, example, id=f"{task} {number}")
    for task, text in SECTIONS.items()
    for number, example in enumerate(EXAMPLE.finditer(text))
]


def shape(value: Any) -> Any:
    """Return a reply with types in place of its texts and numbers."""
    if isinstance(value, dict):
        return {name: shape(item) for name, item in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value]
    return type(value)


@pytest.mark.parametrize(("task", "example"), EXAMPLES)
def test_the_reply_to_a_command_has_the_printed_shape(
    task: str, example: re.Match[str], service_of: Callable[[str], RunningService]
) -> None:
    command = example["command"].replace(ADDRESS, service_of(task).url)
    reply = subprocess.run(["bash", "-c", command], capture_output=True, check=True, timeout=60)
    assert shape(json.loads(reply.stdout)) == shape(json.loads(example["reply"]))


def test_the_page_lists_all_parameters_and_their_defaults() -> None:
    """The section "Long texts" describes `truncation`, for all tasks."""
    for task, text in SECTIONS.items():
        defaults = {match["name"]: match["default"] for match in PARAMETER.finditer(text)}
        fields = TASKS[task].parameters.model_json_schema()["properties"]
        assert {*defaults, "truncation"} == set(fields)
        for name, default in defaults.items():
            value = fields[name].get("default")
            assert default.strip("`") == ("none" if value is None else json.dumps(value)), name
    names = re.findall(r"^\| `(\w+)` \|", section("Hugging Face's format"), re.MULTILINE)
    assert {*names, "truncation"} == {*TASKS["feature-extraction"].parameters.model_fields}
