"""`albert-serve score`: its summary, its key file, and how it ends."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
import pytest

from albert_serve.cli import main
from tests.albert_serve.scoring.jobs import write_jsonl

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


@pytest.mark.parametrize(("options", "num_labels"), [([], 1), (["--all-scores"], 2)])
def test_the_best_label_is_answered_unless_all_are_asked_for(
    options: list[str], num_labels: int, command: Command, tmp_path: Path
) -> None:
    assert command(*options) == 0
    first = (tmp_path / "out.jsonl").read_text().splitlines()[0]
    assert len(json.loads(first)["output"]) == num_labels


def test_a_key_file_that_is_not_text_is_one_line(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "key"
    key.write_bytes(b"\xff\xfe")
    assert command("--server", "http://127.0.0.1:1", "--api-key-file", str(key)) == 1
    assert error_of(capsys) == f"error: --api-key-file {key} is not UTF-8; it must hold the key"
    assert command("--server", "http://127.0.0.1:1", "--api-key-file", f"{key}s") == 1
    assert "No such file" in error_of(capsys)


def test_without_pyarrow_the_extra_is_named(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert command() == 1
    assert "score needs pyarrow: pip install 'albert-serve[score]'" in error_of(capsys)


REFUSED: list[tuple[str, int, str]] = [
    ("--shard 1", 2, "argument --shard: '1' must be I/N, such as 0/8"),
    ("--column review", 2, "argument --column: 'review' must be FIELD=COLUMN"),
    ("--parameters [1]", 2, "argument --parameters: it must be a JSON object"),
    ("--parameters {", 2, "argument --parameters: it is not JSON"),
    ("--shard 2/2", 1, "the shard is 2 of 2; it must be 0 to 1"),
    ("--part-rows 0", 1, "part_rows is 0; it must be 1 or more"),
    ("--max-errors -1", 1, "max_errors is -1; it must be 0 or more"),
    ("--workers 2", 1, "--ray-address and --workers are for --engine ray"),
    ("--engine ray --server http://a", 1, "--server and --engine ray are given"),
    ("--server http://a --concurrency 0", 1, "concurrency is 0; it must be 1 or more"),
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
