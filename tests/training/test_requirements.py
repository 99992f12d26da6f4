"""A venv for serving only: the commands of training and export say what to run."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.albert_serve.support import ROOT


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has none of the packages of training."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder)
    return folder / "bin/python"


@pytest.mark.parametrize(
    "command", ["training.finetune", "training.pretrain", "training.evaluate", "export"]
)
def test_a_command_without_its_packages_is_one_line(command: str, python: Path) -> None:
    done = subprocess.run([python, "-m", command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: torch, ")
    assert line.endswith(": run `make setup`")


def test_an_import_is_not_ended(python: Path) -> None:
    program = "import training; print('imported')"
    done = subprocess.run([python, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "imported\n", done.stderr


def test_with_the_packages_the_commands_run() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "export", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
