"""The command line: output, errors and imports; the counts and statuses of `score`."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
import pytest
import yaml  # type: ignore[import-untyped]

from albert_serve.cli import main
from albert_serve.scoring.errors import JobError
from tests.albert_serve.scoring.jobs import write_jsonl
from tests.albert_serve.support import ROOT

pytestmark = pytest.mark.process


def test_info_describes_a_bundle(bundle_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(bundle_dir), "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    labels = {task["name"]: task["labels"] for task in described["tasks"]}
    assert labels["text-classification"] == ["negative", "positive"]
    sizes = described["card"]["sizes"]
    assert (sizes["hidden_size"], sizes["num_layers"]) == (64, 3)
    assert sizes["weights_bytes"] == (bundle_dir / "model.safetensors").stat().st_size
    assert main(["info", str(bundle_dir)]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{bundle_dir}: an ALBERT in fp32, revision ")
    assert re.search(r"^  text-classification \(negative, positive\)$", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["info", "./nowhere"], "nowhere"),
        (["serve", "--bundle", "./x", "--threads", "no"], "ALBERT_SERVE_THREADS is"),
    ],
)
def test_an_error_is_one_line_and_status_1(
    arguments: list[str],
    message: str,
    failure: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in failure(*arguments)


@pytest.mark.parametrize("arguments", [[], ["sing"], ["serve", "--device", "tpu"]])
def test_wrong_usage_is_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"error: .*\. See `albert-serve( \w+)? --help`\.", line)


def test_a_port_in_use_is_one_line(
    bundle_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Callable[..., str]
) -> None:
    monkeypatch.setenv("BENTOML_HOME", str(tmp_path))
    monkeypatch.setattr(os, "execvpe", lambda *_: pytest.fail("the service was started"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        line = failure("serve", "--bundle", bundle_dir, "--port", port)
    assert line.startswith(f"Cannot listen on port {port} of 127.0.0.1: [Errno 98] Address")


def test_a_missing_extra_is_one_line_with_the_command_that_installs_it() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from albert_serve.cli import main; sys.exit(main(['finetune']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == (
        "error: `albert-serve finetune` needs torch, which is not installed. Run pip install "
        "'albert-serve[train]', or in a clone pip install '.[train]'.\n"
    )


def test_a_terminal_does_not_obey_the_text_of_an_error(
    tmp_path: Path, failure: Callable[..., str]
) -> None:
    table = tmp_path / "in.csv"
    table.write_text("a\x1b[2J\x9b\N{RIGHT-TO-LEFT OVERRIDE}b,é\n1,2\n", encoding="utf-8")
    line = failure("score", "--task", "text-classification", table, tmp_path / "out.csv")
    assert r"it has a\x1b[2J\x9b\u202eb, é." in line


TRAINING_STACK = {
    *("torch", "onnx", "transformers", "sentencepiece", "safetensors"),
    *("training", "export"),
}
SERVING_STACK = {"numpy", "tokenizers", "onnxruntime", "bentoml"}


def imported_by(*modules: str) -> set[str]:
    """The top-level packages in a fresh interpreter after importing these modules."""
    names = ", ".join(f"albert_serve.{module}" for module in modules)
    code = (
        f"import sys, json; import {names}; "
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return set(json.loads(run.stdout.splitlines()[-1]))


def test_the_client_needs_no_serving_stack() -> None:
    imported = imported_by("client", "errors", "config", "api.schemas", "bundle.manifest")
    assert not imported & (SERVING_STACK | TRAINING_STACK)


def test_serving_and_the_command_line_need_neither_torch_nor_pyarrow() -> None:
    imported = imported_by("cli", "server.handlers", "runtime.engine")
    assert not imported & {"pyarrow", *TRAINING_STACK}


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


def test_columns_to_keep_are_listed_by_commas(command: Command, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in.jsonl", [{"id": 1, "more": 2, "text": "An earned run."}])
    assert command("--keep", "text,id") == 0
    assert list(json.loads((tmp_path / "out.jsonl").read_text())) == ["text", "id", "output"]


@pytest.mark.parametrize(
    ("rows", "status"),
    [(['{"text": "a"}', "b"], 1), (['{"text": "a"}', '{"text": "a [MASK]"}'], 0)],
    ids=["none", "one"],
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
        ("--parameters {", 2, "argument --parameters: it is not JSON"),
        ("--shard 2/2", 1, "shard is 2 of 2. It must be 0 to 1."),
        ("--part-rows 0", 1, "part_rows is 0. It must be 1 or more."),
        ("--task fill-mask --all-scores", 1, "--all-scores requires --task text-classification"),
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


def test_schedules_repeat_what_a_repetition_mends() -> None:
    examples = ROOT / "examples/scoring"
    job = yaml.safe_load((examples / "kubernetes-job.yaml").read_text())
    statuses, final = {kind.exit_status for kind in JobError.__subclasses__()}, {1, 2, 3, 4}
    (rule,) = [rule for rule in job["spec"]["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    assert set(rule["onExitCodes"]["values"]) == final
    (passing,) = re.findall(r"^PASSING = (.*?)$", (examples / "airflow_dag.py").read_text(), re.M)
    assert ast.literal_eval(passing) | final == statuses | {1, 2, 130}
    documented = re.findall(r"^\| ([\d, ]+) \|", (ROOT / "docs/batch.md").read_text(), re.M)
    assert {int(one) for text in documented for one in text.split(",")} == statuses | {0, 1, 2, 130}
