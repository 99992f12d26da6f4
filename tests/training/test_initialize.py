"""The local start is ordinary weights that know frequencies and what is near."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.training.support import TINY, ragged
from training.heads import AlbertForTasks
from training.initialize import start_local

COUNTS = np.arange(50)


@pytest.fixture
def model() -> AlbertForTasks:
    torch.manual_seed(0)
    made = AlbertForTasks(TINY, {"fill-mask": 50})
    start_local(made, COUNTS)
    return made.eval()


@torch.no_grad()
def test_it_predicts_the_corpus_frequencies(model: AlbertForTasks) -> None:
    logits = model.logits("fill-mask", model(ragged((16, 16))).flatten(0, 1))
    smoothed = torch.from_numpy((COUNTS + 1) / (COUNTS + 1).sum())
    predicted = logits.softmax(-1).mean(0)
    assert (predicted / smoothed - 1).abs().max() < 0.1


def test_positions_are_like_where_they_are_near(model: AlbertForTasks) -> None:
    table = model.albert.embeddings.position.weight.detach()
    norms = table.norm(dim=1)
    assert (norms / norms[0] - 1).abs().max() < 1e-5
    products = table @ table.T
    distances = torch.arange(16) - torch.arange(16)[:, None]
    for distance in range(1, 16):  # depends on the distance alone
        values = products[distances == distance]
        assert (values - values[0]).abs().max() < 1e-6
    assert products[0, 0] > products[0, 1] > products[0, 2] > products[0, 3]


def test_queries_and_keys_are_one_orthogonal_map(model: AlbertForTasks) -> None:
    for block in model.albert.encoder.attentions:
        query, key = block.get_parameter("query.weight"), block.get_parameter("key.weight")
        assert torch.equal(query, key)
        assert query is not key
        assert torch.allclose(query @ query.T, torch.eye(24), atol=1e-5)
