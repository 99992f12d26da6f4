"""The code that the page shows does what the page did, whatever was written into it."""

from __future__ import annotations

import ast
import json
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from playwright.sync_api import Page

from tests.albert_serve.support import Running
from tests.albert_serve.web.browsing import OpenPage

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=120)
# The driver of the browser loses this one on the way.
NAME = TEXT.filter(lambda name: name != "__proto__")
VALUE = st.recursive(
    TEXT | st.booleans() | st.integers(-1000, 1000) | st.none(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAME, inner, max_size=4),
    max_leaves=8,
)
# Prints what curl would be called with.
SHELL = "curl() { printf '%s\\0' \"$@\"; }\n"


@pytest.mark.parametrize(
    ("task", "method"),
    [
        ("fill-mask", "fill_mask"),
        ("text-classification", "text_classification"),
        ("question-answering", "question_answering"),
        ("sentence-order", "coherence"),
        ("token-classification", "token_classification"),
        ("feature-extraction", "feature_extraction"),
    ],
)
def test_every_tasks_program_and_command_run(
    open_page: OpenPage,
    service_of: Callable[[str], Running],
    capsys: pytest.CaptureFixture[str],
    task: str,
    method: str,
) -> None:
    page = open_page(task, url=f"{service_of(task).url}/")
    program = code_of(page, task, "Python")
    assert f"albert.{method}(" in program
    exec(compile(program, "snippet", "exec"), {})
    assert "0." in capsys.readouterr().out
    command = ["bash", "-c", code_of(page, task, "curl")]
    done = subprocess.run(command, capture_output=True, check=True, timeout=30)
    assert b"0." in done.stdout


def test_the_copy_button_copies_the_code(open_page: OpenPage) -> None:
    page = open_page("fill-mask", permissions=["clipboard-read", "clipboard-write"])
    code = code_of(page, "fill-mask", "Python")
    page.locator("#panel-fill-mask .copy").click()
    page.get_by_text("Copied", exact=True).first.wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == code


def test_any_request_survives_the_shell_and_python(open_page: OpenPage) -> None:
    page = open_page("fill-mask")

    @settings(max_examples=30, deadline=None)
    @given(request=st.dictionaries(NAME, VALUE, max_size=3), wants_key=st.booleans())
    def check(request: dict[str, Any], wants_key: bool) -> None:
        command, program = written(page, request, wants_key)
        *head, body, end = run_shell(command).split("\0")
        assert json.loads(body) == request
        assert head[0] == "http://127.0.0.1:1/p/fill-mask"
        assert ("Authorization: Bearer s3cret" in head) == wants_key
        assert end == ""
        assert python_arguments(program) == ([request], {"options": request})

    check()


def code_of(page: Page, task: str, language: str) -> str:
    panel = page.locator(f"#panel-{task}")
    panel.get_by_role("button", name=language, exact=True).click()
    code: str = panel.locator("pre code").evaluate("place => place.textContent")
    return code


def written(page: Page, request: dict[str, Any], wants_key: bool) -> tuple[str, str]:
    """The command that sends a request, and the program that has it as inputs and as an option."""
    command, program = page.evaluate(
        """async ([request, wantsKey]) => {
            const { curl, python } = await import(new URL('web/code.js', document.baseURI));
            const service = { root: '', url: 'http://127.0.0.1:1/p', model: null, wantsKey };
            const twice = { inputs: request, parameters: { options: request } };
            return [curl(service, 'fill-mask', request), python(service, 'fill-mask', twice)];
        }""",
        [request, wants_key],
    )
    return command, program


def run_shell(command: str) -> str:
    environment = {"ALBERT_API_KEY": "s3cret", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", "-c", SHELL + command],
        capture_output=True,
        check=True,
        timeout=30,
        env=environment,
    )
    return done.stdout.decode()


def python_arguments(program: str) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of the program's one call of the client's method."""
    calls = [node for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Call)]
    [call] = [node for node in calls if ast.unparse(node.func) == "albert.fill_mask"]
    named = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    return [ast.literal_eval(value) for value in call.args], named
