"""Layers are compared where and how the paper does, and the model is left as it was."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from albert_serve.config import AlbertConfig
from tests.training.support import TINY, copies, each_config, equal, is_real, our_model, ragged
from training.errors import TrainingError
from training.model.albert import ModelInputs
from training.model.heads import AlbertForTasks
from training.model.similarity import LayerSimilarity, layer_similarity

BATCHES = (ragged(), ragged((16, 3), seed=5))


def by_hidden_states(model: Any, batches: tuple[ModelInputs, ...]) -> LayerSimilarity:
    """The paper's two measures, from the hidden states that `transformers` gives."""
    distances, angles = [], []
    for batch in batches:
        real = is_real(batch)
        states = model(
            input_ids=batch.ids,
            token_type_ids=batch.types,
            attention_mask=real.long(),
            output_hidden_states=True,
        ).hidden_states
        rows = torch.stack([state[real] for state in states]).double()
        distances.append((rows[1:] - rows[:-1]).norm(dim=-1))
        cosine = torch.cosine_similarity(rows[1:], rows[:-1], dim=-1)
        angles.append(torch.rad2deg(torch.acos(cosine.clamp(-1, 1))))
    return LayerSimilarity(
        distance=tuple(torch.cat(distances, 1).mean(1).tolist()),
        angle_degrees=tuple(torch.cat(angles, 1).mean(1).tolist()),
    )


@each_config
def test_layers_are_compared_as_by_the_hidden_states_of_transformers(config: AlbertConfig) -> None:
    """Without the padding of ragged rows."""
    model, theirs = copies(config, "AlbertForMaskedLM")
    with torch.no_grad():
        wanted = by_hidden_states(theirs, BATCHES)
    found = layer_similarity(model, BATCHES)
    assert len(found.distance) == len(config.layer_plan)
    assert found.distance == pytest.approx(wanted.distance, rel=1e-5)
    assert found.angle_degrees == pytest.approx(wanted.angle_degrees, rel=1e-5)


def test_a_model_in_training_is_left_as_it_was() -> None:
    config = replace(TINY, hidden_dropout=0.5, attention_dropout=0.5)
    model = our_model(config, ("fill-mask", "sentence-order")).train()
    model(replace(BATCHES[0], keys=torch.zeros_like(BATCHES[0].ids))).sum().backward()
    modes = [module.training for module in model.modules()]
    random_state, gradients = torch.get_rng_state(), _gradients(model)
    first = layer_similarity(model, BATCHES)
    assert layer_similarity(model, BATCHES) == first  # no dropout
    assert torch.equal(torch.get_rng_state(), random_state)
    assert equal(_gradients(model), gradients)
    assert [module.training for module in model.modules()] == modes


def _gradients(model: AlbertForTasks) -> dict[str, Tensor | None]:
    return {
        name: None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }


def test_batches_without_a_token_are_refused() -> None:
    with pytest.raises(TrainingError, match="no token to compare layers at"):
        layer_similarity(our_model(TINY, ("fill-mask",)), [])
