"""Hooks for all tests. A file or a folder (`__init__.py`) has its marks in `pytestmark`.

`process`: tests that start processes, browsers or compilers, train, or take seconds; `make
test-fast` omits them.
`gpu`: tests that also run on CUDA, by `make test-gpu`; they are skipped without a GPU.
`extended`: additional cases, and tests of code that rarely changes; `make test` omits them, CI does
not.
"""

from __future__ import annotations

import re
import signal
from functools import cache
from pathlib import Path
from typing import Final

import pytest

_TESTS: Final = Path(__file__).parent
_PYTESTMARK: Final = re.compile(r"^pytestmark = (\[.*?\]|.*?)$", re.MULTILINE | re.DOTALL)
_MARK: Final = re.compile(r"pytest\.mark\.(\w+)")


def pytest_configure() -> None:
    """Accept the interrupts that tests send: programs started in the background ignore them."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the import of omitted files, because imports take longer than many tests."""
    expression = config.getoption("markexpr")
    is_omitted = any(f"not {mark}" in expression for mark in _marks(collection_path))
    return True if is_omitted else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests the marks of their folders, because pytest reads only the marks of files."""
    for item in items:
        for folder in item.path.relative_to(_TESTS).parents:
            for mark in _marks(_TESTS / folder):
                item.add_marker(mark)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that is marked `gpu`, with the reason, if its library cannot use CUDA.

    Tests of training need only torch; all other tests run ONNX Runtime.
    """
    if item.get_closest_marker("gpu") is None:
        return
    reason: str | None
    if item.path.is_relative_to(_TESTS / "training"):
        import torch

        reason = None if torch.cuda.is_available() else "torch finds no CUDA device"
    else:
        from albert_serve.runtime.cuda import no_cuda_reason

        reason = no_cuda_reason()
    if reason is not None:
        pytest.skip(f"needs a GPU (make test-gpu): {reason}")


@cache
def _marks(path: Path) -> list[str]:
    """Return the names in `pytestmark` of a test file, or of a folder's `__init__.py`."""
    file = path / "__init__.py" if path.is_dir() else path
    if file.suffix != ".py" or not file.is_file():
        return []
    statement = _PYTESTMARK.search(file.read_text(encoding="utf-8"))
    return _MARK.findall(statement[1]) if statement else []
