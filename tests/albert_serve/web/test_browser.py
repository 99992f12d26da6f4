"""Without a browser the tests of the page fail in CI; elsewhere they are skipped."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
TESTS = "tests/albert_serve/web/test_looks.py"
MISSING = "chromium is not installed; apt-get install chromium"


def without_browser(folder: Path, *tools: str) -> dict[str, str]:
    """An environment with no other programs than these."""
    for name in tools:
        path = shutil.which(name)
        assert path is not None
        (folder / name).symlink_to(path)
    others = {name: text for name, text in os.environ.items() if name != "PYTEST_ADDOPTS"}
    return {**others, "PATH": str(folder)}


@pytest.mark.slow
def test_a_missing_browser_fails_in_ci(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", TESTS],
        cwd=REPOSITORY,
        env={**without_browser(tmp_path), "CI": "true"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert f"Failed: {MISSING}" in ended.stdout
    assert "passed" not in ended.stdout
