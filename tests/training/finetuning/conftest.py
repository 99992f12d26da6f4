"""What the tests of finetuning share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def start(pretrained: Path) -> list[str]:
    """A run of six steps; its data is left to be named, and the last of an option counts."""
    return [
        *("--initialize-from", str(pretrained / "checkpoint"), "--length", "64"),
        *("--batch-size", "4", "--steps", "6", "--lr", "1e-2", "--adamw-lr", "1e-2"),
        *("--precision", "fp32", "--device", "cpu", "--report-every", "2"),
    ]
