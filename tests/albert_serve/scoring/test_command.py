"""`albert-serve score`: its summary, how it ends, and the examples of schedules."""

from __future__ import annotations

import ast
import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
import pytest
import yaml  # type: ignore[import-untyped]

from albert_serve.cli import command_parser, main
from albert_serve.scoring.errors import JobError
from tests.albert_serve.scoring.jobs import write_jsonl
from tests.albert_serve.support import ROOT

Command = Callable[..., int]


@pytest.fixture
def command(bundle_dir: Path, tmp_path: Path) -> Command:
    """Scores three rows, of which the second is in error, and returns the exit status."""
    rows: list[dict[str, Any]] = [
        {"text": "An earned run."},
        {"text": 5},
        {"text": "A fielding error."},
    ]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    options = ["--task", "text-classification", "--bundle", str(bundle_dir), "--threads", "1"]

    def run(*more: str) -> int:
        return main(["score", *options, *more, str(source), str(tmp_path / "out.jsonl")])

    return run


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    return line


def test_the_summary_has_the_counts(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "a/new/folder/summary.json"
    assert command("--summary", str(file)) == 0
    summary = json.loads(file.read_text())
    assert (summary["status"], summary["num_rows"], summary["num_errors"]) == ("complete", 3, 1)
    assert summary["errors_by_type"] == {"invalid_input": 1}
    assert command("--summary", str(file), "--errors", "fail") == 3
    failed = json.loads(file.read_text())
    assert failed["status"] == "failed"
    assert failed["error"].startswith("1 of 3 rows failed. The first error: ")


def test_a_summary_that_cannot_be_is_refused(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = {
        tmp_path: "is a folder. Pass a file",
        tmp_path / "in.jsonl": "is also an input or the output",
        tmp_path / "out.jsonl": "is also an input or the output",
    }
    for file, message in refused.items():
        assert command("--summary", str(file)) == 1
        assert f"error: --summary {file} {message}" in error_of(capsys)
    assert command("--summary", f"{tmp_path}/in.jsonl/summary.json") == 7
    assert "summary.json cannot be written: " in error_of(capsys)
    assert [file.name for file in tmp_path.iterdir()] == ["in.jsonl"]
    file = tmp_path / "summary.json"
    file.with_name("summary.json.partial").symlink_to("/dev/full")
    assert command("--summary", str(file), "--errors", "fail") == 3
    assert "1 of 3 rows failed. The first error: " in error_of(capsys)
    assert command("--summary", str(file)) == 7
    assert error_of(capsys) == f"error: {file} cannot be written: No space left on device."
    assert (tmp_path / "out.jsonl").exists()


def test_the_summary_of_the_job_that_writes_there_is_left_alone(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, folder = tmp_path / "summary.json", tmp_path / "out.jsonl.parts"
    file.write_text("the other job's")
    folder.mkdir()
    with filelock.FileLock(folder / "_lock"):
        assert command("--summary", str(file)) == 5
    assert "Another job writes to" in error_of(capsys)
    assert file.read_text() == "the other job's"


@pytest.mark.parametrize(
    ("options", "kept"),
    [([], ["id", "text"]), (["--keep", "text,id"], ["text", "id"]), (["--keep", ""], [])],
)
def test_columns_to_keep_are_listed_by_commas(
    options: list[str], kept: list[str], command: Command, tmp_path: Path
) -> None:
    write_jsonl(tmp_path / "in.jsonl", [{"id": 1, "text": "An earned run."}])
    assert command(*options) == 0
    assert list(json.loads((tmp_path / "out.jsonl").read_text())) == [*kept, "output"]


def test_the_last_line_counts_long_texts(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(tmp_path / "in.jsonl", [{"text": "An earned run."}, {"text": "too long " * 300}])
    lines = {}
    for option in ("--truncation", "--no-truncation"):
        assert command(option) == 0
        lines[option] = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(
        r"1 of 2 texts were truncated to \d+ tokens \(--no-truncation .*\)", lines["--truncation"]
    )
    assert re.fullmatch(
        r"1 of 2 texts were omitted, .* \d+ tokens \(--truncation .*\)", lines["--no-truncation"]
    )


def test_without_pyarrow_the_extra_is_named(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert command() == 1
    assert "score needs pyarrow. Run pip install 'albert-serve[score]'" in error_of(capsys)


@pytest.mark.parametrize(
    ("rows", "status"),
    [([], 0), (['{"text": "a"}', "b"], 1), (['{"text": "a"}', '{"text": "a [MASK]"}'], 0)],
    ids=["empty", "none", "one"],
)
def test_score_fails_if_no_row_was_answered(
    rows: list[str],
    status: int,
    bundle_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source, output = write_jsonl(tmp_path / "in", rows), tmp_path / "out.jsonl"
    options = ["--task", "fill-mask", "--bundle", str(bundle_dir), "--threads", "1"]
    assert main(["score", *options, str(source), str(output)]) == status
    assert len(output.read_text().splitlines()) == len(rows)
    if status:
        message = f"error: No row of {source} was answered. The first error: "
        assert error_of(capsys).startswith(message)


@pytest.mark.process
def test_a_reader_that_has_enough_ends_the_job_without_a_message(
    bundle_dir: Path, tmp_path: Path
) -> None:
    write_jsonl(tmp_path / "in.jsonl", [{"text": f"An earned run {i}."} for i in range(2000)])
    command = f"{shlex.quote(sys.executable)} -m albert_serve score --task text-classification"
    command += f" --bundle {shlex.quote(str(bundle_dir))} --threads 1 --part-rows 20"
    piped = f"set -o pipefail; {command} - - < {shlex.quote(str(tmp_path))}/in.jsonl | head -1"
    done = subprocess.run(["bash", "-c", piped], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")
    assert json.loads(done.stdout)["text"] == "An earned run 0."


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        ("--shard 1", 2, "argument --shard: '1' must be I/N, such as 0/8"),
        ("--column review", 2, "argument --column: 'review' must be FIELD=COLUMN"),
        ("--parameters [1]", 2, "argument --parameters: it must be a JSON object"),
        ("--parameters {", 2, "argument --parameters: it is not JSON"),
        ("--shard 2/2", 1, "shard is 2 of 2. It must be 0 to 1."),
        ("--part-rows 0", 1, "part_rows is 0. It must be 1 or more."),
        ("--max-errors -1", 1, "max_errors is -1. It must be 0 or more."),
        ("--delimiter ;;", 1, "delimiter is ';;'. Use one character"),
        ("--task fill-mask --all-scores", 1, "--all-scores requires --task text-classification"),
        ('--all-scores --parameters {"top_k":1}', 1, "without top_k in --parameters."),
    ],
)
def test_options_that_cannot_be_are_one_line(
    options: str, status: int, message: str, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        ended: object = command(*options.split())
    except SystemExit as usage:
        ended = usage.code
    assert ended == status
    assert message in error_of(capsys)


EXAMPLES = ROOT / "examples/scoring"
JOB = yaml.safe_load((EXAMPLES / "kubernetes-job.yaml").read_text())


def test_each_pod_has_its_shard_and_its_output() -> None:
    (container,) = JOB["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["python", "-m", "albert_serve", "score"]
    count = JOB["spec"]["completions"]
    pods = [
        command_parser("score").parse_args(
            [text.replace("$(JOB_COMPLETION_INDEX)", str(index)) for text in container["args"]]
        )
        for index in range(count)
    ]
    assert [pod.shard for pod in pods] == [(index, count) for index in range(count)]
    assert len({pod.output for pod in pods}) == count


def test_schedules_repeat_what_a_repetition_mends() -> None:
    statuses, final = {kind.exit_status for kind in JobError.__subclasses__()}, {1, 2, 3, 4}
    (rule,) = [rule for rule in JOB["spec"]["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    assert set(rule["onExitCodes"]["values"]) == final
    (passing,) = re.findall(r"^PASSING = (.*?)$", (EXAMPLES / "airflow_dag.py").read_text(), re.M)
    assert ast.literal_eval(passing) | final == statuses | {1, 2, 130}
    documented = re.findall(r"^\| ([\d, ]+) \|", (ROOT / "docs/batch.md").read_text(), re.M)
    assert {int(one) for text in documented for one in text.split(",")} == statuses | {0, 1, 2, 130}
