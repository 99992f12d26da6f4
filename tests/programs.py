"""Programs that tests call and pip does not install."""

from __future__ import annotations

import os
import shutil

import pytest


def needs_program(*names: str, package: str | None = None) -> str:
    """Return the path of a program; without it, skip the test, or let it fail in CI.

    Args:
        names: names of the program, the usual name first.
        package: Debian's package of the program (default: the usual name).
    """
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        end = pytest.fail if is_ci() else pytest.skip
        end(f"{names[0]} is not installed. Run apt-get install {package or names[0]}.")
    return path


def is_ci() -> bool:
    """Whether tests run in CI: most systems, and `.ci/run`, set the variable CI."""
    return os.environ.get("CI", "").lower() not in ("", "0", "false")
