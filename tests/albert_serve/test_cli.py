"""The command line: output, errors and imports; the summary and exit status of `score`."""

from __future__ import annotations

import ast
import io
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

import filelock
import pytest
import yaml  # type: ignore[import-untyped]

from albert_serve.cli import command_parser, main
from albert_serve.scoring.errors import JobError
from tests.albert_serve.scoring.jobs import write_jsonl
from tests.albert_serve.support import ROOT

pytestmark = pytest.mark.process


def test_info_describes_a_bundle(bundle_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(bundle_dir), "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    labels = {task["name"]: task["labels"] for task in info["tasks"]}
    assert labels["text-classification"] == ["negative", "positive"]
    assert labels["question-answering"] is None
    sizes = info["card"]["sizes"]
    assert (sizes["hidden_size"], sizes["num_layers"]) == (64, 3)
    assert sizes["weights_bytes"] == (bundle_dir / "model.safetensors").stat().st_size
    assert main(["info", str(bundle_dir)]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{bundle_dir}: an ALBERT in fp32, revision ")
    assert re.search(r"^  text-classification \(negative, positive\)$", text, re.MULTILINE)
    megabytes = sizes["weights_bytes"] / 1e6
    assert f"parameters in {megabytes:.1f} MB, 3 layers of 64 with 4 heads" in text


def test_an_error_is_one_line_without_control_characters_and_its_exit_status_is_1(
    tmp_path: Path, error_of_command: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Characters that the output's encoding lacks are escaped, too."""
    assert "nowhere does not exist" in error_of_command("info", tmp_path / "nowhere")
    line = error_of_command("serve", "--bundle", tmp_path, "--threads", "no")
    assert line.startswith("ALBERT_SERVE_THREADS is 'no'")
    table = tmp_path / "in.csv"
    table.write_text("a\x1b[2J\x9b\N{RIGHT-TO-LEFT OVERRIDE}b,é\n1,2\n", encoding="utf-8")
    line = error_of_command("score", "--task", "text-classification", table, tmp_path / "out.csv")
    assert r"it has a\x1b[2J\x9b\u202eb, é." in line
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BytesIO(), "ascii"))
    assert main(["info", "é"]) == 1
    sys.stderr.seek(0)
    assert r"\xe9 does not exist" in sys.stderr.read()


@pytest.mark.parametrize(
    "arguments", [[], ["sing"], ["serve", "--device", "tpu"], ["score", "in.csv", "out.csv"]]
)
def test_wrong_usage_is_printed_in_one_line_with_exit_status_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"error: .*\. See `albert-serve( \w+)? --help`\.", line)


def test_the_port_is_3000_and_a_port_in_use_is_an_error_before_the_service_starts(
    bundle_dir: Path, monkeypatch: pytest.MonkeyPatch, error_of_command: Callable[..., str]
) -> None:
    assert command_parser("serve").get_default("port") == 3000
    monkeypatch.setattr(os, "execvpe", lambda *_: pytest.fail("the service was started"))
    assert "nowhere contains no bundle" in error_of_command("serve", "--models", "nowhere")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        line = error_of_command("serve", "--bundle", bundle_dir, "--port", port)
    assert line.startswith(f"Cannot listen on port {port} of 127.0.0.1: [Errno 98] Address")


def test_a_missing_extra_is_an_error_with_the_command_that_installs_it() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from albert_serve.cli import main; sys.exit(main(['finetune']))"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert process.returncode == 1
    assert process.stderr == (
        "error: `albert-serve finetune` needs torch, which is not installed. Run pip install "
        "'albert-serve[train]', or in a clone pip install '.[train]'.\n"
    )


TRAINING = "torch onnx transformers sentencepiece safetensors training export"


@pytest.mark.parametrize(
    ("modules", "forbidden"),
    [
        ("client config api.schemas bundle.manifest", "numpy tokenizers onnxruntime bentoml"),
        ("cli server.handlers runtime.engine", "pyarrow"),
    ],
)
def test_client_and_service_import_no_packages_of_other_parts(modules: str, forbidden: str) -> None:
    names = ", ".join(f"albert_serve.{module}" for module in modules.split())
    code = f"import sys, json; import {names}; print(json.dumps(list(sys.modules)))"
    output = subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT)
    imported = {name.partition(".")[0] for name in json.loads(output.splitlines()[-1])}
    assert not imported & set(f"{TRAINING} {forbidden}".split())


Score = Callable[..., int]


@pytest.fixture
def score(bundle_dir: Path, tmp_path: Path) -> Score:
    """A function that scores three rows, of which the second is invalid. It returns the status."""
    texts = ("An earned run. " * 50, 5, "A fielding error.")
    rows = [{"id": i, "more": 2, "text": text} for i, text in enumerate(texts)]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    options = ["--task", "text-classification", "--bundle", str(bundle_dir), "--threads", "1"]

    def run(*extra_options: str) -> int:
        return main(["score", *options, *extra_options, str(source), str(tmp_path / "out.jsonl")])

    return run


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the error in the output."""
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    return line


def test_a_job_writes_the_kept_columns_and_a_summary_with_its_status_counts_and_error(
    score: Score, tmp_path: Path
) -> None:
    file = tmp_path / "a/new/folder/summary.json"
    assert score("--summary", str(file), "--keep", "text,id") == 0
    first, *_ = (tmp_path / "out.jsonl").read_text().splitlines()
    assert list(json.loads(first)) == ["text", "id", "output", "truncated_tokens"]
    summary = json.loads(file.read_text())
    assert (summary["status"], summary["num_rows"], summary["num_errors"]) == ("complete", 3, 1)
    assert summary["errors_by_type"] == {"invalid_input": 1}
    assert score("--summary", str(file), "--errors", "fail") == 3
    failed = json.loads(file.read_text())
    assert failed["status"] == "failed"
    assert failed["error"].startswith("1 of 3 rows failed. The first error: ")


def test_a_second_job_does_not_overwrite_the_summary_of_the_running_job(
    score: Score, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, folder = tmp_path / "summary.json", tmp_path / "out.jsonl.parts"
    file.write_text("running job")
    folder.mkdir()
    with filelock.FileLock(folder / "_lock"):
        assert score("--summary", str(file)) == 5
    assert "Another job writes to" in error_of(capsys)
    assert file.read_text() == "running job"
    assert score("--summary", str(tmp_path / "in.jsonl")) == 1
    assert "is also an input or the output. Pass another file." in error_of(capsys)


@pytest.mark.parametrize(
    ("rows", "status"),
    [(['{"text": "a"}', "b"], 1), (['{"text": "a"}', '{"text": "a [MASK]"}'], 0)],
    ids=["no-row", "one-row"],
)
def test_score_fails_only_if_no_row_was_answered(
    rows: list[str], status: int, score: Score, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    assert score("--task", "fill-mask") == status
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == len(rows)
    if status:
        message = f"error: No row of {source} was answered. The first error: "
        assert error_of(capsys).startswith(message)


def test_a_closed_pipe_ends_the_job_without_a_message(bundle_dir: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in.jsonl", [{"text": f"An earned run {i}."} for i in range(2000)])
    command = f"{shlex.quote(sys.executable)} -m albert_serve score --task text-classification"
    command += f" --bundle {shlex.quote(str(bundle_dir))} --threads 1 --part-rows 20"
    piped = f"set -o pipefail; {command} - - < {shlex.quote(str(tmp_path))}/in.jsonl | head -1"
    process = subprocess.run(["bash", "-c", piped], cwd=ROOT, capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (128 + signal.SIGPIPE, "")
    assert json.loads(process.stdout)["text"] == "An earned run 0."


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        ("--shard 1", 2, "argument --shard: '1' must be I/N, such as 0/8"),
        ("--column review", 2, "argument --column: 'review' must be FIELD=COLUMN"),
        ("--parameters {", 2, "argument --parameters: it is not JSON"),
        ("--summary .", 1, "--summary . is a folder. Pass a file."),
        ("--shard 2/2", 1, "shard is 2 of 2. It must be 0 to 1."),
        ("--part-rows 0", 1, "part_rows is 0. It must be 1 or more."),
        ("--max-errors -1", 1, "max_errors is -1. It must be 0 or more."),
        ("--delimiter ;;", 1, "delimiter is ';;'. Use one character"),
        ("--task fill-mask --all-scores", 1, "--all-scores requires --task text-classification"),
    ],
)
def test_an_invalid_option_is_an_error_of_one_line(
    options: str, status: int, message: str, score: Score, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        exit_status: object = score(*options.split())
    except SystemExit as usage_error:
        exit_status = usage_error.code
    assert exit_status == status
    assert message in error_of(capsys)


def test_example_schedules_retry_only_temporary_errors_and_all_statuses_are_documented() -> None:
    examples = ROOT / "examples/scoring"
    job = yaml.safe_load((examples / "kubernetes-job.yaml").read_text())
    statuses = {error_class.exit_status for error_class in JobError.__subclasses__()}
    final = {1, 2, 3, 4}
    (rule,) = [rule for rule in job["spec"]["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    assert set(rule["onExitCodes"]["values"]) == final
    dag = (examples / "airflow_dag.py").read_text()
    (temporary,) = re.findall(r"^PASSING = (.*?)$", dag, re.MULTILINE)
    assert ast.literal_eval(temporary) | final == statuses | {1, 2, 130}
    cells = re.findall(r"^\| ([\d, ]+) \|", (ROOT / "docs/batch.md").read_text(), re.MULTILINE)
    documented = {int(number) for cell in cells for number in cell.split(",")}
    assert documented == statuses | {0, 1, 2, 130}
