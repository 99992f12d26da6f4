"""The local start is ordinary weights that know frequencies and look at neighbours."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.training.support import TINY, ragged
from training.model.albert import Attention
from training.model.heads import AlbertForTasks
from training.model.initialization import start_local

COUNTS = np.arange(50) ** 2
CONFIG = replace(
    TINY, embedding_size=64, hidden_size=128, num_heads=4, num_groups=2, max_positions=32
)


@pytest.fixture
def model() -> AlbertForTasks:
    torch.manual_seed(0)
    made = AlbertForTasks(CONFIG, {"fill-mask": 50})
    start_local(made, COUNTS)
    return made.eval()


@torch.no_grad()
def test_it_predicts_the_corpus_frequencies(model: AlbertForTasks) -> None:
    logits = model.logits("fill-mask", model(ragged((16, 16))).flatten(0, 1))
    smoothed = torch.from_numpy((COUNTS + 1) / (COUNTS + 1).sum()).float()
    predicted = logits.softmax(-1).mean(0)
    entropy = -(smoothed * smoothed.log()).sum()
    assert -(smoothed * predicted.log()).sum() < 1.1 * entropy


@torch.no_grad()
def test_each_head_looks_at_one_neighbour(model: AlbertForTasks) -> None:
    """Head 0 one back, head 1 one ahead, head 2 two back, head 3 two ahead."""
    batch = ragged((32, 32, 32))
    x_bsh = model.albert.embeddings(batch.ids, batch.types, None)
    for block in model.albert.encoder.attentions:
        assert isinstance(block, Attention)
        query, key = (
            part(x_bsh).unflatten(-1, (4, -1)).transpose(1, 2) for part in (block.query, block.key)
        )
        seen = (query @ key.transpose(-1, -2)).argmax(-1)[:, :, 2:-2]
        offsets = seen - torch.arange(2, 30)
        for head, expected in enumerate((-1, 1, -2, 2)):
            assert (offsets[:, head] == expected).float().mean() > 0.9
