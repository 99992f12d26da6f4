"""The examples of schedules name options that there are, and are valid."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml  # type: ignore[import-untyped]

from albert_serve.cli import command_parser
from albert_serve.cli.score import read_score_options
from albert_serve.scoring.errors import JobError
from tests.albert_serve.support import ROOT

EXAMPLES = ROOT / "examples/scoring"
JOB = yaml.safe_load((EXAMPLES / "kubernetes-job.yaml").read_text())
CONTAINER = JOB["spec"]["template"]["spec"]["containers"][0]


def parsed(command: list[str]) -> Any:
    """The options of a command; a usage error ends the test."""
    assert command[0] == "albert-serve"
    options = command_parser().parse_args(command[1:])
    return read_score_options(options)


@pytest.mark.parametrize("version", ["1.33", "1.37"])
def test_the_kubernetes_job_is_valid(version: str) -> None:
    kubernetes_validate.validate(JOB, version, strict=True)


def test_each_pod_has_its_shard_and_its_output() -> None:
    assert CONTAINER["command"] == ["python", "-m", "albert_serve", "score"]
    count = JOB["spec"]["completions"]
    shards, outputs = set(), set()
    for index in range(count):
        arguments = [
            text.replace("$(JOB_COMPLETION_INDEX)", str(index)) for text in CONTAINER["args"]
        ]
        shards.add(parsed(["albert-serve", "score", *arguments]).shard)
        outputs.add(arguments[-1])
    assert shards == {(index, count) for index in range(count)}
    assert len(outputs) == count


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
    documented = re.findall(r"^\| ([\d, ]+) \|", (ROOT / "docs/scoring.md").read_text(), re.M)
    assert {int(one) for text in documented for one in text.split(",")} == statuses() | {0, 130}


def test_the_commands_of_cron_and_airflow_are_parsed() -> None:
    lines = (EXAMPLES / "crontab").read_text().splitlines()
    (line,) = [line for line in lines if not line.startswith("#")]
    minute, hour, *_ = line.split(maxsplit=5)
    assert (minute, hour) == ("15", "2-4")
    command = line.partition("; ")[2].partition(" >>")[0].replace("\\%", "%")
    assert parsed(shlex.split(command)).columns == {"text": "review"}
    source = (EXAMPLES / "airflow_dag.py").read_text()
    (call,) = [
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "command"
    ]
    words = eval(ast.unparse(call), {"ds": "2026-01-01"})
    assert parsed(words).max_errors == 1000
    assert Path(words[-1]).suffix == ".parquet"
