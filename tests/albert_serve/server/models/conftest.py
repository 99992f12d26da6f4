"""A folder of bundles."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import onnxruntime
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


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The encoders' sessions that are opened: the bundle's folder, and whether threads spin."""
    opened: list[tuple[str, str]] = []

    class Recorded(onnxruntime.InferenceSession):  # type: ignore[misc]
        def __init__(self, graph: str, options: Any, **others: Any) -> None:
            super().__init__(graph, options, **others)
            if Path(graph).name == "encoder.onnx":
                spins = options.get_session_config_entry("session.intra_op.allow_spinning")
                opened.append((Path(graph).parent.name, spins))

    monkeypatch.setattr(onnxruntime, "InferenceSession", Recorded)
    return opened
