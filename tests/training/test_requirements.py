"""A command whose packages are missing says which, in one line."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import training
from training.requirements import PACKAGES

ROOT = Path(training.__file__).parents[1]
# Stands for `python -m training.vocab` where a package is not installed.
WITHOUT = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == sys.argv[1] else find(name, *rest)
sys.argv = ["-m"]
import training
"""


@pytest.mark.parametrize("package", ["torch", "pyarrow"])
def test_a_missing_package_is_one_line(package: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, package],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == (
        f"error: {package} is not installed; training and export need more than serving does: "
        "run `make setup`\n"
    )


def imported(file: Path) -> Iterator[str]:
    """The packages that a module imports as it is loaded."""
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            yield (statement.module or "").partition(".")[0]


def test_every_package_that_training_imports_is_checked() -> None:
    own = {"training", "albert_serve"} | set(sys.stdlib_module_names)
    packages = {name for file in (ROOT / "training").rglob("*.py") for name in imported(file)}
    assert packages - own <= set(PACKAGES)
    assert set(PACKAGES) - packages == {"matplotlib"}
