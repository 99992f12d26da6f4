"""The scripts of examples/ run as they are, on a model in this process and against a service."""

from __future__ import annotations

import json
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
    "sentence_order": (rf"{SCORED}|coherence .+|at best .+|.*Vienna.*", 5),
    "multiple_choice": (SCORED, 3),
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
def test_a_script_runs_on_a_model_in_this_process(
    script: str, bundle_dir: Path, choice_bundle: Path, run: Run
) -> None:
    bundle = choice_bundle if script == "multiple_choice" else bundle_dir
    assert_output(script, run(script, "--local", str(bundle)))


def test_a_script_runs_against_a_service(
    service: Running, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_output("batch_stream", run("batch_stream", "--url", service.url))
    monkeypatch.setenv("ALBERT_URL", service.url)
    assert_output("fill_mask", run("fill_mask"))


def test_options_of_scripts(bundle_dir: Path, run: Run) -> None:
    local = ("--local", str(bundle_dir))
    for script, options, num_lines in (
        ("fill_mask", ("[MASK] and [MASK]", "--top-k", "2"), 4),
        ("fill_mask", ("A [MASK].", "--targets", "the", "a house"), 2),
        ("question_answering", ("Who?", "Ada came.", "--allow-none", "--top-k", "2"), 2),
    ):
        assert len(run(script, *local, *options)) == num_lines


def test_a_row_that_is_refused_has_its_error(bundle_dir: Path, tmp_path: Path, run: Run) -> None:
    file = tmp_path / "rows.jsonl"
    texts = ["a film", "a long text " * 200, "another film"]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    local = ("--local", str(bundle_dir), str(file))
    for options, errors in (((), [None, "too_long", None]), (("--truncate",), [None] * 3)):
        rows = [json.loads(line) for line in run("batch_stream", *local, *options)]
        assert [row["text"] for row in rows] == texts
        assert [row.get("error_type") for row in rows] == errors
        assert ["label" in row for row in rows] == [error is None for error in errors]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--local", "/nowhere"], "/nowhere/manifest.json is not there"),
        (["--url", "http://127.0.0.1:9"], "is the service running?"),
        ([], "there is no address; pass base_url"),
    ],
)
def test_an_error_is_one_line(
    options: list[str], reason: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ALBERT_URL", raising=False)
    with pytest.raises(SystemExit) as ended:
        run("fill_mask", *options)
    assert str(ended.value).startswith("error: ")
    assert reason in str(ended.value)
    assert "\n" not in str(ended.value)
