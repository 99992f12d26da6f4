"""The examples of schedules name options that there are, and are valid."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml  # type: ignore[import-untyped]

from albert_serve.cli import command_parser
from albert_serve.cli.score import read_score_options
from albert_serve.scoring.errors import JobError
from tests.albert_serve.scoring.jobs import read_table, write_csv
from tests.albert_serve.support import ROOT

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
