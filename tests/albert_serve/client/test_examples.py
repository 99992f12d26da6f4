"""The scripts of examples/ and the documents' programs for a service run as they are printed."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.albert_serve.support import ROOT, Running

EXAMPLES = ROOT / "examples"
SCRIPTS = {
    path.stem
    for path in EXAMPLES.glob("*.py")
    if '__name__ == "__main__"' in path.read_text() and "from connection" in path.read_text()
}
# Helpers, and pipelines of Ray and Spark, which the tests of scoring run.
SHARED = {path.stem for path in EXAMPLES.glob("*.py")} - SCRIPTS
SCORED = r"[01]\.\d{4}  .+"
# What a line of the output looks like, and how many there are.
OUTPUTS: dict[str, tuple[str, int]] = {
    "fill_mask": (SCORED, 5),
    "text_classification": (rf"(positive|negative) {SCORED}", 2),
    "question_answering": (SCORED, 1),
    "sentence_order": (rf"{SCORED}|coherence .+", 3),
    "embeddings": (r"-?" + SCORED, 3),
    "batch_stream": (r'\{"id": ".", "text": .*"label": "(positive|negative)".*\}', 4),
}


Run = Callable[..., list[str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a script as Python does, but in this process; returns the lines that it prints."""

    def run_script(script: str, *options: str) -> list[str]:
        monkeypatch.syspath_prepend(str(EXAMPLES))
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *options])
        monkeypatch.delitem(sys.modules, "connection", raising=False)
        runpy.run_path(str(EXAMPLES / f"{script}.py"), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return run_script


def assert_output(script: str, lines: list[str]) -> None:
    pattern, count = OUTPUTS[script]
    assert len(lines) == count
    for line in lines:
        assert re.fullmatch(pattern, line), line


def test_every_script_is_tested_and_listed() -> None:
    assert set(OUTPUTS) == SCRIPTS
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`(\w+)\.py`", page)) == SCRIPTS | SHARED


@pytest.mark.parametrize("script", sorted(OUTPUTS))
def test_a_script_runs_on_a_model_in_this_process(script: str, bundle_dir: Path, run: Run) -> None:
    assert_output(script, run(script, "--local", str(bundle_dir)))


PAGE = (ROOT / "docs/client.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:3000"
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_a_program_runs_as_printed(
    number: int, service: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    program = PROGRAMS[number]
    assert ADDRESS in program
    exec(compile(program.replace(ADDRESS, service.url), f"program {number}", "exec"), {})
    assert capsys.readouterr().out.strip()
