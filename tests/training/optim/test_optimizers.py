"""Rates follow the schedule, and every weight is stepped by one optimizer at its own rate."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from itertools import permutations
from typing import Any, Final, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.training.support import TINY, our_model, pretend_bf16
from training.model.heads import AlbertForTasks
from training.optim.lamb import Lamb
from training.optim.muon import Muon
from training.optim.optimizers import (
    OptimizerError,
    OptimizerName,
    Optimizers,
    OptimizerSettings,
    Schedule,
    build_optimizers,
)

NAMES: tuple[OptimizerName, ...] = get_args(OptimizerName)


@pytest.fixture
def model() -> AlbertForTasks:
    return our_model(TINY, ("fill-mask", "sentence-order"))


def tf_learning_rate(step: int, init_lr: float, num_train_steps: int, num_warmup: int) -> float:
    """`create_optimizer` of google-research/ALBERT's `optimization.py`, with power 1."""
    global_step = min(step, num_train_steps)
    learning_rate = (init_lr - 0.0) * math.pow(1 - global_step / num_train_steps, 1.0) + 0.0
    if num_warmup:
        warmup_percent_done = step / num_warmup
        warmup_learning_rate = init_lr * warmup_percent_done
        is_warmup = float(step < num_warmup)
        learning_rate = (1.0 - is_warmup) * learning_rate + is_warmup * warmup_learning_rate
    return learning_rate


@settings(deadline=None)
@given(st.integers(1, 200_000), st.data())
def test_the_linear_schedule_is_the_original_s(num_steps: int, data: st.DataObject) -> None:
    num_warmup = data.draw(st.integers(0, num_steps))
    near = st.integers(max(0, num_warmup - 1), min(num_steps, num_warmup + 1))
    step = data.draw(st.integers(0, num_steps) | near)
    schedule = Schedule(kind="linear", warmup=num_warmup / num_steps)
    expected = tf_learning_rate(step, 0.00176, num_steps, num_warmup)
    assert 0.00176 * schedule.factor(step / num_steps) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("progress", "factor"),
    [(0.05, 0.5), (0.1, 1.0), (0.5, 1.0), (0.6, 1.0), (0.7, 0.5), (1.0, 0.0)],
)
def test_warm_up_constant_decay(progress: float, factor: float) -> None:
    assert Schedule(warmup=0.1, decay=0.4).factor(progress) == pytest.approx(factor)


def test_warm_up_and_decay_are_parts_of_one_run() -> None:
    with pytest.raises(OptimizerError, match="together they may be 1 at most"):
        Schedule(warmup=0.5, decay=0.6)


def peak_rates(optimizers: Optimizers) -> dict[int, float]:
    """By the identity of the parameter; no parameter has two."""
    groups = [group for part in optimizers.parts for group in part.param_groups]
    rates = [(id(p), group["peak_lr"]) for group in groups for p in group["params"]]
    assert len(rates) == len(dict(rates))
    return dict(rates)


@pytest.mark.parametrize("name", NAMES)
def test_layers_matrices_the_rest_and_pooled_heads_have_rates_of_their_own(
    model: AlbertForTasks, name: OptimizerName
) -> None:
    optimizer_settings = OptimizerSettings(optimizer=name, lr=2.0, adamw_lr=1.0, pooled_factor=0.25)
    rates = peak_rates(build_optimizers(model, optimizer_settings))
    rest = 1.0 if name == "muon" else 2.0
    for each, parameter in model.named_parameters():
        if each.startswith("albert.encoder") and parameter.ndim == 2:
            assert rates[id(parameter)] == 2.0, each
        elif each.startswith(("pooler", "heads.sentence-order")):
            assert rates[id(parameter)] == rest / 4, each
        else:
            assert rates[id(parameter)] == rest, each


def set_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)


def test_adamw_steps_as_torch_s_own(model: AlbertForTasks) -> None:
    """Over the whole model; the rate is a third of the peak, norms and biases do not decay."""
    other = our_model(TINY, ("fill-mask", "sentence-order"))
    groups = [
        [p for p in other.parameters() if (p.ndim == 2) == decays] for decays in (True, False)
    ]
    plain = torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": 0.2}, {"params": groups[1], "weight_decay": 0.0}],
        lr=0.01,
        betas=(0.9, 0.98),
        eps=1e-6,
        foreach=False,
    )
    optimizer_settings = OptimizerSettings(
        optimizer="adamw", lr=0.03, pooled_factor=1.0, weight_decay=0.2
    )
    ours = build_optimizers(model, optimizer_settings)
    for step in range(5):
        set_gradients(model, step)
        set_gradients(other, step)
        ours.step(1 / 3)
        plain.step()
    for (name, weight), expected in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("name", NAMES)
def test_a_state_that_comes_back_steps_the_same(name: OptimizerName) -> None:
    """Through a file, to the bit, and whatever settings the optimizers were built with."""
    weights: list[dict[str, Tensor]] = []
    for is_interrupted in (False, True):
        model = our_model(TINY, ("sentence-order",))
        optimizers = build_optimizers(model, OptimizerSettings(optimizer=name, lr=0.02))
        for step in range(4):
            if is_interrupted and step == 2:
                file = io.BytesIO()
                torch.save(optimizers.state_dict(), file)
                file.seek(0)
                fresh = our_model(TINY, ("sentence-order",), seed=5)
                fresh.load_state_dict(model.state_dict())
                model = fresh
                optimizers = build_optimizers(model, OptimizerSettings(optimizer=name, lr=0.9))
                optimizers.load_state_dict(torch.load(file, weights_only=True))
            set_gradients(model, step)
            optimizers.step(1 / (step + 1))
        weights.append(model.state_dict())
    for key, weight in weights[0].items():
        assert torch.equal(weight, weights[1][key]), key


@pytest.mark.parametrize(("name", "other"), [*permutations(NAMES, 2)])
def test_a_state_of_another_optimizer_is_refused(
    model: AlbertForTasks, name: OptimizerName, other: OptimizerName
) -> None:
    state = build_optimizers(model, OptimizerSettings(optimizer=other)).state_dict()
    optimizers = build_optimizers(model, OptimizerSettings(optimizer=name))
    with pytest.raises(OptimizerError, match="of the run"):
        optimizers.load_state_dict(state)


def test_lamb_has_the_mean_trust_ratio_as_a_figure(model: AlbertForTasks) -> None:
    optimizers = build_optimizers(
        model, OptimizerSettings(optimizer="lamb", lr=0.01, weight_decay=0.0)
    )
    assert optimizers.figures() == {}
    matrices = [p for p in model.parameters() if p.ndim == 2]
    lengths = [p.norm().item() for p in matrices]
    set_gradients(model, 0)
    optimizers.step(1.0)
    # At the first step every number of u is 0.1 over the root of 0.001, but for epsilon.
    ratios = [
        length / (0.1 / 0.001**0.5 * p.numel() ** 0.5)
        for length, p in zip(lengths, matrices, strict=True)
    ]
    expected = sum(ratios) / len(ratios)
    assert optimizers.figures() == {"trust_ratio": pytest.approx(expected, rel=1e-3)}
    assert isinstance(optimizers.parts[0], Lamb)


# Square, wide, tall, and of a single row and column.
SHAPES: Final = [(24, 24), (24, 40), (40, 24), (1, 7), (7, 1)]


def random(shape: tuple[int, int], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_matrices() -> list[nn.Parameter]:
    return [nn.Parameter(random(shape, seed)) for seed, shape in enumerate(SHAPES)]


def torch_s(matrices: Sequence[nn.Parameter], **changes: Any) -> Optimizer:
    """The optimizer that ours follows."""
    options: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.3, "adjust_lr_fn": "match_rms_adamw"}
    return torch.optim.Muon(matrices, **{**options, **changes})


def our_muon(matrices: Sequence[nn.Parameter]) -> Muon:
    return Muon(matrices, lr=0.02, weight_decay=0.3)


def train(optimizer: Optimizer, steps: Sequence[int]) -> None:
    """The steps of these numbers; sizes of gradients and rates differ from step to step."""
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = 0.02 / (step + 1)
            for number, parameter in enumerate(group["params"]):
                parameter.grad = random(parameter.shape, 100 * step + number) * 10.0 ** (step - 2)
        optimizer.step()


@pytest.mark.parametrize(
    ("has_bf16", "rounding"),
    [pytest.param(True, 2**-8, id="bf16"), pytest.param(False, 0.03, id="fp32")],
)
def test_steps_are_torch_s(
    has_bf16: bool, rounding: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to a rounding of the way; in fp32 up to the several that torch's bf16 adds up."""
    pretend_bf16(monkeypatch, has_bf16)
    first, mine, theirs = make_matrices(), make_matrices(), make_matrices()
    train(our_muon(mine), range(5))
    train(torch_s(theirs), range(5))
    for start, one, other in zip(first, mine, theirs, strict=True):
        assert (one - other).norm() < rounding * (other - start).norm(), one.shape
