"""A folder of bundles."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def shelf(bundle_dir: Path, int8_dir: Path, tmp_path: Path) -> Path:
    """A folder with two bundles, and things beside them that are none."""
    folder = tmp_path / "bundles"
    shutil.copytree(bundle_dir, folder / "first")
    shutil.copytree(int8_dir, folder / "second")
    shutil.copytree(int8_dir, folder / ".partial")
    (folder / "notes").mkdir()
    return folder
