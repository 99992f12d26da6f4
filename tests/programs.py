"""Programs that tests run and pip does not install."""

from __future__ import annotations

import os
import shutil

import pytest


def needs_program(*names: str, package: str | None = None) -> str:
    """Return the path of a program. Without the program, skip the test; in CI, fail it.

    Args:
        names: names of the program, the usual name first.
        package: Debian's package of the program (default: the usual name).
    """
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        is_ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
        stop = pytest.fail if is_ci else pytest.skip
        stop(f"{names[0]} is not installed. Run apt-get install {package or names[0]}.")
    return path
