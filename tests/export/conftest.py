"""A tiny checkpoint with four heads, and a small one whose vocabulary was trained on text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.export.checkpoints import ALL_TASKS, TINY, write_checkpoint
from tests.training.support import WIKI, randomize
from training.data.corpus import read_documents
from training.model.checkpoint import save_checkpoint
from training.model.heads import AlbertForTasks, head_sizes
from training.vocabulary.spiece import build_tokenizer
from training.vocabulary.training import train_vocab


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint with random weights, 50 pieces and 30 positions."""
    write_checkpoint(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


@pytest.fixture(scope="session")
def real_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with random weights, 600 pieces and 64 positions. Copy it to change it."""
    vocab = tmp_path_factory.mktemp("vocab")
    spiece = train_vocab(read_documents([WIKI]), vocab, vocab_size=600)
    build_tokenizer(spiece).save(str(vocab / "tokenizer.json"))
    config = replace(TINY, vocab_size=600, max_positions=64)
    model = AlbertForTasks(config, head_sizes(config, ALL_TASKS))
    randomize(model, seed=0)
    folder = tmp_path_factory.mktemp("real") / "checkpoint"
    labels = {"id2label": {"0": "negative", "1": "positive"}}
    save_checkpoint(model.eval(), folder, tokenizer_from=vocab, extra_config=labels)
    return folder
