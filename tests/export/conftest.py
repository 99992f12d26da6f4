"""A tiny checkpoint with four heads, and a small one whose vocabulary was trained on text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.export.exporting import TINY, write_checkpoint, write_real_checkpoint


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint with random weights, 50 pieces and 30 positions."""
    write_checkpoint(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


@pytest.fixture(scope="session")
def real_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with random weights, 600 pieces and 64 positions. Copy it to change it."""
    config = replace(TINY, vocab_size=600, max_positions=64)
    return write_real_checkpoint(tmp_path_factory.mktemp("real") / "checkpoint", config)
