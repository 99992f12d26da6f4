"""Rates follow the schedule, and every weight is stepped by one optimizer at its own rate."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.training.support import TINY, our_model
from training.heads import AlbertForTasks
from training.optim import Optimizers, Schedule, adamw, muon_with_adamw


@pytest.fixture
def model() -> AlbertForTasks:
    return our_model(TINY, ("fill-mask", "sentence-order"))


@pytest.mark.parametrize(
    ("progress", "factor"),
    [(0.05, 0.5), (0.1, 1.0), (0.5, 1.0), (0.6, 1.0), (0.7, 0.5), (1.0, 0.0)],
)
def test_warm_up_constant_decay(progress: float, factor: float) -> None:
    assert Schedule(warmup=0.1, decay=0.4).factor(progress) == pytest.approx(factor)


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_factors_are_parts(progress: float, warmup: float, decay: float) -> None:
    assert 0 <= Schedule(warmup=warmup, decay=decay).factor(progress) <= 1


def test_the_first_step_moves_and_without_warm_up_at_full_rate() -> None:
    assert 0 < Schedule(warmup=0.03).factor(0.0) < 0.01
    assert Schedule(warmup=0.0, decay=0.0).factor(0.0) == 1.0
    assert Schedule(warmup=0.0, decay=0.0).factor(1.0) == 1.0


def test_every_weight_has_one_optimizer(model: AlbertForTasks) -> None:
    parts = muon_with_adamw(model, muon_lr=2.0, adamw_lr=1.0, pooled_lr=0.5).parts
    stepped = [p for part in parts for group in part.param_groups for p in group["params"]]
    assert len(stepped) == len(set(map(id, stepped)))
    assert set(map(id, stepped)) == {id(p) for p in model.parameters()}


def test_layers_matrices_the_rest_and_pooled_heads_have_rates_of_their_own(
    model: AlbertForTasks,
) -> None:
    optimizers = muon_with_adamw(model, muon_lr=2.0, adamw_lr=1.0, pooled_lr=0.5)
    groups = [group for part in optimizers.parts for group in part.param_groups]
    rates = {id(p): group["peak_lr"] for group in groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        if name.startswith("albert.encoder") and parameter.ndim == 2:
            assert rates[id(parameter)] == 2.0, name
        elif name.startswith(("pooler", "heads.sentence-order")):
            assert rates[id(parameter)] < 1.0, name
        else:
            assert rates[id(parameter)] == 1.0, name


def test_norms_and_biases_are_not_decayed(model: AlbertForTasks) -> None:
    optimizer = adamw(list(model.parameters()), lr=0.1, weight_decay=0.5)
    decay = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    for name, parameter in model.named_parameters():
        is_vector = name.endswith("bias") or "norm" in name
        assert decay[id(parameter)] == (0.0 if is_vector else 0.5), name


def test_a_step_is_made_at_a_part_of_each_peak_rate() -> None:
    first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    both = Optimizers(
        [
            torch.optim.SGD([{"params": [parameter], "peak_lr": lr}], lr=9.0)
            for parameter, lr in ((first, 0.1), (second, 0.4))
        ]
    )
    (first.sum() + second.sum()).backward()  # type: ignore[no-untyped-call]
    both.step(0.5)
    assert torch.allclose(first.detach(), torch.full((2,), 0.95))
    assert torch.allclose(second.detach(), torch.full((2,), 0.8))
    assert first.grad is None
    assert second.grad is None


def test_adamw_s_first_step_has_the_size_of_its_rate() -> None:
    """Bias correction: without it the first steps would be of another size."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizers = Optimizers([adamw([parameter], lr=0.01)])
    (parameter * torch.tensor([1.0, -20.0, 0.5])).sum().backward()  # type: ignore[no-untyped-call]
    optimizers.step(1.0)
    expected = torch.tensor([-0.01, 0.01, -0.01])
    assert torch.allclose(parameter.detach(), expected, rtol=1e-3)


def test_a_state_that_comes_back_steps_the_same() -> None:
    weights: list[dict[str, torch.Tensor]] = []
    for _ in range(2):
        model = our_model(TINY, ("sentence-order",))
        optimizers = muon_with_adamw(model, muon_lr=0.02, adamw_lr=0.01, pooled_lr=0.01)
        for step in range(4):
            if step == 2 and weights:
                saved, fresh = optimizers.state_dict(), our_model(TINY, ("sentence-order",))
                fresh.load_state_dict(model.state_dict())
                model = fresh
                optimizers = muon_with_adamw(model, muon_lr=0.02, adamw_lr=0.01, pooled_lr=0.01)
                optimizers.load_state_dict(saved)
            loss = sum(
                p.square().sum() + (p * math.sqrt(step + 1)).sum() for p in model.parameters()
            )
            assert isinstance(loss, torch.Tensor)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizers.step(1 / (step + 1))
        weights.append(model.state_dict())
    for name, weight in weights[0].items():
        assert torch.equal(weight, weights[1][name])
