"""The README's commands, from a CSV file to a service, and the notebooks run as printed."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from scripts.notebooks import NOTEBOOKS, notebook_file, read_notebook, run_notebook
from tests.albert_serve.support import ROOT, running_service

_FOLDERS: Final = ("models", "tests", "training", "export", "albert_serve", "examples")
# A test appends smaller sizes; if an option is given twice, the last one counts.
_SMALLER: Final = {
    "finetune": "--steps 12 --batch-size 16",
    "export": "--max-cost 20",  # int8 costs a model of 12 steps more
}


def printed_commands(program: str) -> list[str]:
    """Return the commands of the README's first shell block that has this program."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = next(
        block for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) if program in block
    )
    lines = (line for line in block.splitlines() if not line.startswith("#"))
    commands = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [command for command in commands if command.strip()]


@pytest.mark.extended
@pytest.mark.process
def test_the_readmes_commands_lead_from_a_csv_to_a_reply(tmp_path: Path) -> None:
    """They run in a folder like a clone of the repository."""
    install, *commands, serve = printed_commands("--output runs/intents")
    assert install == "pip install '.[train]'"
    for name in _FOLDERS:
        (tmp_path / name).symlink_to(ROOT / name)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "BENTOML_HOME": str(tmp_path / "home"), "PATH": path}
    for command in commands:
        line = f"{command} {_SMALLER.get(command.split()[1], '')}"
        here = {**environment, "PYTHONPATH": str(tmp_path)}
        run = subprocess.run(line, shell=True, cwd=tmp_path, env=here, capture_output=True)
        assert run.returncode == 0, (line, run.stdout, run.stderr)
    [curl] = printed_commands("card was stolen")
    body = json.loads(shlex.split(curl)[-1])
    with running_service(
        environment, tmp_path, ("albert_serve", *shlex.split(serve)[1:])
    ) as service:
        reply = httpx.post(f"{service.url}/text-classification", json=body, timeout=30).json()
    manifest = json.loads((tmp_path / "bundles/intents/manifest.json").read_text())
    assert manifest["precision"] == "int8"
    assert reply[0][0]["label"] in manifest["heads"]["text-classification"]["labels"]
    assert len(manifest["heads"]["text-classification"]["labels"]) == 6


def outputs_of(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_stored_with_outputs_that_name_no_machine(name: str) -> None:
    stored = json.dumps(outputs_of(read_notebook(name)))
    assert "stdout" in stored
    assert not re.search(r"stderr|(?<![\w.:/])/(home|root|tmp|usr|Users|opt|mnt)\b", stored)
    assert notebook_file(name).stat().st_size < 100_000


@pytest.mark.extended
@pytest.mark.process
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_and_prints_what_is_stored(name: str, tmp_path: Path) -> None:
    kinds = [
        [(output.output_type, *sorted(output.get("data", ()))) for output in outputs_of(notebook)]
        for notebook in (run_notebook(name, tmp_path), read_notebook(name))
    ]
    assert kinds[0] == kinds[1]
