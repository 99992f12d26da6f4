"""Options of the runtime with a cache of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from albert_serve.settings import RuntimeOptions


@pytest.fixture
def options(tmp_path: Path) -> RuntimeOptions:
    return RuntimeOptions(device="cpu", num_threads=1, cache_folder=tmp_path / "cache")
