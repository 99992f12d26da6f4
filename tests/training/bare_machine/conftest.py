"""A corpus in several parts, and the Python of a bare machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.bare_machine.support import make_python
from tests.training.support import WIKI
from training.prepare import prepare


@pytest.fixture(scope="session")
def parts(vocab_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `wiki.jsonl` in several parts."""
    folder = tmp_path_factory.mktemp("parts") / "shards"
    shards = prepare([WIKI], vocab_dir / "tokenizer.json", folder, part_bytes=30_000)
    assert len(shards.parts) >= 3
    return folder


@pytest.fixture(scope="session")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with torch and none of what else this project needs."""
    return make_python(tmp_path_factory.mktemp("machine") / "python", has_torch=True)


@pytest.fixture(scope="session")
def empty_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with nothing installed."""
    return make_python(tmp_path_factory.mktemp("machine") / "python", has_torch=False)
