"""Layers are compared where and how the paper does, and the model is left as it was."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from albert_serve.config import AlbertConfig
from tests.training.support import TINY, equal, hf_model, is_real, our_model, ragged
from training.errors import TrainingError
from training.model.albert import Batch
from training.model.checkpoint import HF_NAMES
from training.model.heads import AlbertForTasks
from training.model.similarity import LayerSimilarity, layer_similarity

BATCHES = (ragged(), ragged((16, 3), seed=5))
CONFIGS: dict[str, AlbertConfig] = {
    "shared": TINY,
    "groups": replace(TINY, num_groups=2),
    "inner": replace(TINY, num_inner_layers=2),
    "groups of inner": replace(TINY, num_groups=2, num_inner_layers=2),
}


def hf_twin(model: AlbertForTasks) -> Any:
    """The same weights in `transformers`, by the table of names."""
    theirs = hf_model(model.config, "AlbertForMaskedLM")
    state, ours = theirs.state_dict(), model.state_dict()
    inner = model.config.num_inner_layers
    for stem, theirs_stem in HF_NAMES.items():
        for n in range(max(model.config.num_attentions, model.config.num_ffns)):
            group, place = divmod(n, inner)
            prefix = f"albert.encoder.albert_layer_groups.{group}.albert_layers.{place}"
            for kind in ("weight", "bias"):
                name = f"{theirs_stem.format(layer=prefix, n=n)}.{kind}"
                if name in state and f"{stem.format(n=n)}.{kind}" in ours:
                    state[name] = ours[f"{stem.format(n=n)}.{kind}"]
    theirs.load_state_dict(state)
    return theirs


def by_hidden_states(model: Any, batches: tuple[Batch, ...]) -> LayerSimilarity:
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


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_layers_are_compared_as_by_the_hidden_states_of_transformers(config: AlbertConfig) -> None:
    model = our_model(config, ("fill-mask",)).double()
    with torch.no_grad():
        wanted = by_hidden_states(hf_twin(model).double().eval(), BATCHES)
    found = layer_similarity(model, BATCHES)
    assert len(found.distance) == len(config.layer_plan)
    assert found.distance == pytest.approx(wanted.distance, rel=1e-5)
    assert found.angle_degrees == pytest.approx(wanted.angle_degrees, rel=1e-5)


def test_a_layer_that_does_nothing_is_at_zero() -> None:
    """Both blocks add nothing to a residual whose norm is that of a norm already."""
    model = our_model(TINY, ("fill-mask",)).double()
    with torch.no_grad():
        for name, parameter in model.albert.encoder.named_parameters():
            is_scale = name.endswith("norm.weight")
            parameter.fill_(1.0 if is_scale else 0.0)
    found = layer_similarity(model, BATCHES)
    assert found.distance[0] > 1e-3  # the embeddings are not normed
    assert found.distance[1:] == pytest.approx([0.0] * 3, abs=1e-5)
    assert found.angle_degrees[1:] == pytest.approx([0.0] * 3, abs=1e-5)


def test_padding_counts_for_nothing() -> None:
    model = our_model(TINY, ("fill-mask",))
    batch = ragged((5, 3))
    wider = Batch(
        ids=torch.nn.functional.pad(batch.ids, (0, 9), value=7),
        types=torch.nn.functional.pad(batch.types, (0, 9)),
        lengths=batch.lengths,
    )
    narrow, wide = layer_similarity(model, [batch]), layer_similarity(model, [wider])
    assert narrow.distance == pytest.approx(wide.distance, rel=1e-5)
    assert narrow.angle_degrees == pytest.approx(wide.angle_degrees, rel=1e-5)


def test_a_model_in_training_is_left_as_it_was() -> None:
    config = replace(TINY, hidden_dropout=0.5, attention_dropout=0.5)
    model = our_model(config, ("fill-mask", "sentence-order")).train()
    model(BATCHES[0]).sum().backward()
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


@pytest.mark.parametrize("part", ["encoder", "encoder.attentions.0"])
def test_a_compiled_model_is_measured_and_stays_compiled(part: str) -> None:
    wanted = layer_similarity(our_model(TINY, ("fill-mask",)), BATCHES)
    model = our_model(TINY, ("fill-mask",))
    num_compiled = 0

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        nonlocal num_compiled
        num_compiled += 1
        return graph.forward

    model.albert.get_submodule(part).compile(backend=backend)
    with torch.no_grad():
        before = model(BATCHES[0])
    assert num_compiled
    assert layer_similarity(model, BATCHES) == wanted
    num_before = num_compiled
    with torch.no_grad():
        assert torch.equal(model(BATCHES[0]), before)
    assert num_compiled == num_before


@pytest.mark.parametrize("batches", [[], [ragged((4, 4), seed=1)]], ids=["none", "padding alone"])
def test_batches_without_a_token_are_refused(batches: list[Batch]) -> None:
    empty = [replace(batch, lengths=torch.zeros(2, dtype=torch.long)) for batch in batches]
    with pytest.raises(TrainingError, match="no token to compare layers at"):
        layer_similarity(our_model(TINY, ("fill-mask",)), empty)
