"""A checkpoint and its bundle from the service's tests, and the setup of a run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from albert_serve.tokenizer import AlbertTokenizer
from tests.albert_serve.conftest import bundle_dir, checkpoint_dir
from tests.training.support import TINY
from training.loop.distributed import World
from training.tasks.base import TrainingSetup

__all__ = ["bundle_dir", "checkpoint_dir"]


@pytest.fixture
def setup(tokenizer: AlbertTokenizer) -> TrainingSetup:
    """A run of a tiny model on one process, with texts of at most 16 tokens."""
    return TrainingSetup(
        tokenizer=tokenizer,
        architecture=replace(TINY, vocab_size=tokenizer.vocab_size),
        world=World(),
        seed=0,
        length=16,
        truncation=True,
        micro_batch_size=None,
        compiles=False,
    )
