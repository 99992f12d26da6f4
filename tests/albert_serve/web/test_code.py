"""The code that the page shows does what the page did, whatever was written into it."""

from __future__ import annotations

import ast
import json
import subprocess
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from tests.albert_serve.support import Running
from tests.albert_serve.web.browsing import OpenPage


def test_the_commands_and_programs_give_the_answers_that_the_page_shows(
    open_page: OpenPage,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = open_page("fill-mask")
    page.fill("#fill-mask-text", 'It\'s a [MASK] "run" of $HOME `ls` \\n.')
    page.get_by_role("button", name="Predict").click()
    done = subprocess.run(
        ["bash", "-c", code_of(page, "fill-mask", "curl")],
        capture_output=True,
        check=True,
        timeout=30,
    )
    words = [one["token_str"] for one in json.loads(done.stdout)]
    expect(page.locator("#panel-fill-mask .bar-label")).to_have_text(words)
    exec(compile(code_of(page, "fill-mask", "Python"), "snippet", "exec"), {})
    assert f"token_str={words[0]!r}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("task", "method"),
    [
        ("text-classification", "text_classification"),
        ("question-answering", "question_answering"),
        ("sentence-order", "coherence"),
        ("multiple-choice", "multiple_choice"),
    ],
)
def test_every_tasks_program_runs(
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
    assert "=0." in capsys.readouterr().out


def test_the_program_of_embeddings_prints_them(
    open_page: OpenPage, capsys: pytest.CaptureFixture[str]
) -> None:
    program = code_of(open_page("feature-extraction"), "feature-extraction", "Python")
    exec(compile(program, "snippet", "exec"), {})
    embeddings = ast.literal_eval(capsys.readouterr().out)
    assert [sum(number**2 for number in one) for one in embeddings] == pytest.approx([1.0] * 4)


def test_the_copy_button_copies_the_code(open_page: OpenPage) -> None:
    page = open_page("fill-mask", permissions=["clipboard-read", "clipboard-write"])
    code = code_of(page, "fill-mask", "Python")
    page.locator("#panel-fill-mask .copy").click()
    page.get_by_text("Copied", exact=True).first.wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == code


def code_of(page: Page, task: str, language: str) -> str:
    panel = page.locator(f"#panel-{task}")
    panel.get_by_role("button", name=language, exact=True).click()
    code: str = panel.locator("pre code").evaluate("place => place.textContent")
    return code
