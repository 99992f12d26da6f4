"""The programs of docs/client.md run as printed, and it names all that the client has."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from albert_serve.client import AlbertClient
from tests.albert_serve.support import Running

PAGE = (Path(__file__).resolve().parents[3] / "docs/client.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
ADDRESS = "http://127.0.0.1:3000"
METHODS = [
    name
    for name, _ in inspect.getmembers(AlbertClient, inspect.isfunction)
    if not name.startswith("_") and not name.endswith("_stream") and name != "close"
]


def row_of(name: str) -> list[str]:
    """The cells of a table's row that begins with this name."""
    [line] = re.findall(rf"^\| `{name}` \|(.*)\|$", PAGE, re.MULTILINE)
    return [cell.strip() for cell in line.split(" | ")]


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_a_program_runs_as_printed(
    number: int, service: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    program = PROGRAMS[number]
    assert ADDRESS in program
    exec(compile(program.replace(ADDRESS, service.url), "docs/client.md", "exec"), {})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_row(method: str) -> None:
    assert row_of(method)


def test_the_options_of_the_client_have_their_defaults() -> None:
    for name, parameter in inspect.signature(AlbertClient).parameters.items():
        default = row_of(name)[0].strip("`")
        assert default == (
            ""
            if parameter.default is parameter.empty
            else f"{parameter.default:g}"
            if isinstance(parameter.default, float)
            else str(parameter.default)
        )
