"""A venv for serving only: the commands of training and export say what to run."""

from __future__ import annotations

import ast
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.albert_serve.support import ROOT
from training import PACKAGES

pytestmark = pytest.mark.process


def test_a_command_without_its_packages_is_one_line(tmp_path: Path) -> None:
    """In a Python that has none of the packages of training; an import is not ended."""
    venv.create(tmp_path)
    words = ("training.commands.finetune", "training.commands.pretrain", "export")
    for arguments in (["-c", "import training"], *(["-m", word] for word in words)):
        command = [str(tmp_path / "bin/python"), *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if arguments[0] == "-c":
            assert (done.returncode, done.stderr) == (0, "")
            continue
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert line.startswith("error: filelock, ")
        assert ", torch, " in line
        assert ". For training and export, run pip install 'albert-serve[train]', or in a" in line


def test_a_folder_called_training_does_not_replace_ours(tmp_path: Path) -> None:
    (tmp_path / "training").mkdir()
    (tmp_path / "training/__init__.py").write_text("raise SystemExit('the wrong package')")
    command = [str(Path(sys.executable).with_name("albert-serve")), "finetune", "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.startswith("usage: albert-serve finetune"), done.stderr


def test_every_package_that_training_imports_is_checked() -> None:
    modules = [ast.parse(file.read_text()) for file in (ROOT / "training").rglob("*.py")]
    names = {
        alias.name if isinstance(statement, ast.Import) else statement.module or ""
        for module in modules
        for statement in module.body
        if isinstance(statement, ast.Import | ast.ImportFrom)
        for alias in statement.names
    }
    packages = {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names)
    assert packages - {"training", "albert_serve"} <= set(PACKAGES)
    assert set(PACKAGES) - packages == {"scipy", "sklearn", "transformers"}
