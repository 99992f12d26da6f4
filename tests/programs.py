"""Programs that tests call and that pip does not install."""

from __future__ import annotations

import os
import shutil

import pytest


def needs_program(*names: str, package: str | None = None) -> str:
    """Return the path of the first of these names that is installed.

    Where there is none, the test is skipped; in CI, which sets the variable CI, it fails.

    Args:
        names: of one program, the usual one first.
        package: Debian's package that has it; the usual name if left out.
    """
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        end = pytest.fail if is_ci() else pytest.skip
        end(f"{names[0]} is not installed; apt-get install {package or names[0]}")
    return path


def is_ci() -> bool:
    """Whether tests run in CI, as most systems of CI and `.ci/run` say by the variable CI."""
    return os.environ.get("CI", "").lower() not in ("", "0", "false")
