"""`albert-serve score`: its summary, how it ends, and the examples of schedules."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import filelock
import kubernetes_validate
import pytest
import yaml  # type: ignore[import-untyped]

from albert_serve.cli import command_parser, main
from albert_serve.cli.score import read_score_options
from albert_serve.scoring.errors import JobError
from tests.albert_serve.scoring.jobs import read_table, write_csv, write_jsonl
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


def read(file: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads(file.read_text())
    return summary


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    return line


def test_the_summary_has_the_counts(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "a/new/folder/summary.json"
    assert command("--summary", str(file)) == 0
    summary = read(file)
    assert (summary["status"], summary["num_rows"], summary["num_errors"]) == ("complete", 3, 1)
    assert summary["errors_by_type"] == {"invalid_input": 1}
    assert command("--summary", str(file), "--errors", "fail") == 3
    assert read(file)["status"] == "failed"
    assert read(file)["error"].startswith("1 rows are in error; the first: ")


def test_a_summary_that_cannot_be_is_refused_before_the_job(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = {
        tmp_path: "is a folder; it must be a file",
        tmp_path / "in.jsonl": "is also an input or the output",
        tmp_path / "out.jsonl": "is also an input or the output",
    }
    for file, message in refused.items():
        assert command("--summary", str(file)) == 1
        assert f"error: --summary {file} {message}" in error_of(capsys)
    assert command("--summary", f"{tmp_path}/in.jsonl/summary.json") == 7
    assert "summary.json cannot be written: " in error_of(capsys)
    assert [file.name for file in tmp_path.iterdir()] == ["in.jsonl"]


def test_the_summary_of_the_job_that_writes_there_is_left_alone(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, folder = tmp_path / "summary.json", tmp_path / "out.jsonl.parts"
    file.write_text("the other job's")
    folder.mkdir()
    with filelock.FileLock(folder / "_lock"):
        assert command("--summary", str(file)) == 5
    assert "another job writes to" in error_of(capsys)
    assert file.read_text() == "the other job's"


def test_a_summary_on_a_full_disk_is_status_7_unless_the_job_failed(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "summary.json"
    file.with_name("summary.json.partial").symlink_to("/dev/full")
    assert command("--summary", str(file), "--errors", "fail") == 3
    assert "1 rows are in error; the first: " in error_of(capsys)
    assert command("--summary", str(file)) == 7
    assert error_of(capsys) == f"error: {file} cannot be written: No space left on device"
    assert (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("options", "kept"),
    [([], ["id", "text"]), (["--keep", "text,id"], ["text", "id"]), (["--keep", ""], [])],
)
def test_columns_to_keep_are_listed_by_commas(
    options: list[str], kept: list[str], command: Command, tmp_path: Path
) -> None:
    write_jsonl(tmp_path / "in.jsonl", [{"id": 1, "text": "An earned run."}])
    assert command(*options) == 0
    assert list(read(tmp_path / "out.jsonl")) == [*kept, "output"]


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
    assert "score needs pyarrow: pip install 'albert-serve[score]'" in error_of(capsys)


@pytest.mark.parametrize(
    ("rows", "status"),
    [
        pytest.param([], 0, id="empty"),
        pytest.param(['{"text": "a"}', "b"], 1, id="none"),
        pytest.param(['{"text": "a"}', '{"text": "a [MASK]"}'], 0, id="one"),
    ],
)
def test_score_fails_if_no_row_was_answered(
    rows: list[str],
    status: int,
    bundle_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source, output = tmp_path / "in", tmp_path / "out.jsonl"
    source.write_text("".join(f"{row}\n" for row in rows))
    options = ["--task", "fill-mask", "--bundle", str(bundle_dir), "--threads", "1"]
    assert main(["score", *options, str(source), str(output)]) == status
    assert len(output.read_text().splitlines()) == len(rows)
    if status:
        (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
        assert line.startswith(f"error: no row of {source} was answered; the first error: ")


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


REFUSED: list[tuple[str, int, str]] = [
    ("--shard 1", 2, "argument --shard: '1' must be I/N, such as 0/8"),
    ("--column review", 2, "argument --column: 'review' must be FIELD=COLUMN"),
    ("--parameters [1]", 2, "argument --parameters: it must be a JSON object"),
    ("--parameters {", 2, "argument --parameters: it is not JSON"),
    ("--shard 2/2", 1, "the shard is 2 of 2; it must be 0 to 1"),
    ("--part-rows 0", 1, "part_rows is 0; it must be 1 or more"),
    ("--max-errors -1", 1, "max_errors is -1; it must be 0 or more"),
]


@pytest.mark.parametrize(("options", "status", "message"), REFUSED)
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
CONTAINER = JOB["spec"]["template"]["spec"]["containers"][0]


def parsed(command: list[str]) -> Any:
    """The options of a command; a usage error ends the test."""
    assert command[0] == "albert-serve"
    options = command_parser(command[1]).parse_args(command[2:])
    return read_score_options(options)


@pytest.mark.parametrize("version", ["1.33", "1.37"])
def test_the_kubernetes_job_is_valid(version: str) -> None:
    kubernetes_validate.validate(JOB, version, strict=True)


def test_each_pod_has_its_shard_and_its_output() -> None:
    assert CONTAINER["command"] == ["python", "-m", "albert_serve", "score"]
    count = JOB["spec"]["completions"]
    shards, outputs = set(), set()
    for index in range(count):
        arguments = arguments_of(index)
        shards.add(parsed(["albert-serve", "score", *arguments]).shard)
        outputs.add(arguments[-1])
    assert shards == {(index, count) for index in range(count)}
    assert len(outputs) == count


def arguments_of(index: int) -> list[str]:
    """The arguments in the pod of an index, as Kubernetes fills them in."""
    return [text.replace("$(JOB_COMPLETION_INDEX)", str(index)) for text in CONTAINER["args"]]


def statuses() -> set[int]:
    return {kind.exit_status for kind in JobError.__subclasses__()} | {1, 2}


def test_schedules_repeat_what_a_repetition_mends() -> None:
    final = {1, 2, 3, 4}
    (rule,) = [rule for rule in JOB["spec"]["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    assert set(rule["onExitCodes"]["values"]) == final
    module = ast.parse((EXAMPLES / "airflow_dag.py").read_text())
    (passing,) = [
        ast.literal_eval(node.value)
        for node in module.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PASSING"
    ]
    assert passing | final == statuses() | {130}
    documented = re.findall(r"^\| ([\d, ]+) \|", (ROOT / "docs/batch.md").read_text(), re.M)
    assert {int(one) for text in documented for one in text.split(",")} == statuses() | {0, 130}


@pytest.mark.process
def test_the_line_of_cron_runs_as_printed(bundle_dir: Path, tmp_path: Path) -> None:
    lines = (EXAMPLES / "crontab").read_text().splitlines()
    (line,) = [line for line in lines if not line.startswith("#")]
    minute, hour, *_, command = line.split(maxsplit=5)
    assert (minute, hour) == ("15", "2-4")
    # Cron's own escape, and the folders of a machine.
    command = command.replace("\\%", "%").replace("/data/", f"{tmp_path}/")
    command = command.replace("/var/log/", f"{tmp_path}/")
    for days in (0, 1):  # the day may end before the command begins
        folder = tmp_path / f"reviews/{date.today() - timedelta(days=days)}"
        folder.mkdir(parents=True)
        write_csv(folder / "a.csv", [{"review": "A fine film."}, {"review": "A long one."}])
    program = tmp_path / "bin/albert-serve"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m albert_serve "$@"\n')
    program.chmod(0o755)
    environment = {
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "PYTHONPATH": str(ROOT),
        "ALBERT_SERVE_BUNDLE": str(bundle_dir),
        "ALBERT_SERVE_THREADS": "1",
    }
    for _ in range(2):
        subprocess.run(["/bin/sh", "-c", command], env=environment, cwd=tmp_path, check=True)
    first, second = (tmp_path / "albert-score.log").read_text().splitlines()
    assert "2 rows, 0 with errors, in " in first
    assert "2 rows, 0 with errors, 2 from an earlier run, in " in second
    (done,) = tmp_path.glob("scored/*/_SUCCESS")
    assert len(read_table(done.with_name("part-000000.parquet"))) == 2
    assert json.loads(done.parent.with_suffix(".json").read_text())["status"] == "complete"


def test_the_command_of_airflow_is_parsed() -> None:
    source = (EXAMPLES / "airflow_dag.py").read_text()
    (call,) = [
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "command"
    ]
    words = eval(ast.unparse(call), {"ds": "2026-01-01"})
    assert parsed(words).max_errors == 1000
    assert Path(words[-1]).suffix == ".parquet"
