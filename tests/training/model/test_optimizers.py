"""Optimizers step as the original code and torch do, at the scheduled learning rates."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from albert_serve.config import Sharing
from tests.training.support import JOINT_TASKS, TINY, our_model, pretend_bf16
from training.model.heads import AlbertForTasks
from training.model.hf_names import parameters
from training.optim.lamb import Lamb
from training.optim.muon import Muon
from training.optim.optimizers import (
    OptimizerError,
    OptimizerName,
    OptimizerSettings,
    Schedule,
    build_optimizers,
)

pytestmark = pytest.mark.process

Array: TypeAlias = "NDArray[np.float64]"
NAMES: tuple[OptimizerName, ...] = get_args(OptimizerName)


@dataclass(kw_only=True)
class TfLamb:
    """`lamb_optimizer.py` of google-research/ALBERT at commit 6ca4dfd, line by line, in numpy."""

    learning_rate: float
    weight_decay_rate: float = 0.01
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-6
    exclude: Sequence[str] = ("LayerNorm", "layer_norm", "bias")
    m: dict[str, Array] = field(default_factory=dict)
    v: dict[str, Array] = field(default_factory=dict)
    ratios: list[float] = field(default_factory=list)

    def next_param(self, name: str, param: Array, grad: Array) -> Array:
        m = self.m.get(name, np.zeros_like(param))
        v = self.v.get(name, np.zeros_like(param))
        self.m[name] = self.beta_1 * m + (1.0 - self.beta_1) * grad
        self.v[name] = self.beta_2 * v + (1.0 - self.beta_2) * np.square(grad)
        update: Array = self.m[name] / (np.sqrt(self.v[name]) + self.epsilon)
        is_excluded = any(re.search(pattern, name) is not None for pattern in self.exclude)
        if not is_excluded:
            update = update + self.weight_decay_rate * param
        ratio = 1.0
        if not is_excluded:
            w_norm = float(np.linalg.norm(param.ravel(), ord=2))
            g_norm = float(np.linalg.norm(update.ravel(), ord=2))
            if w_norm > 0 and g_norm > 0:
                ratio = w_norm / g_norm
            self.ratios.append(ratio)
        return param - ratio * self.learning_rate * update


def as_array(tensor: Tensor) -> Array:
    return tensor.detach().numpy().copy()


def normal(shape: Sequence[int], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64)


@settings(deadline=None, max_examples=100)
@given(
    shapes=st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=4),
    lr=st.sampled_from([1e-4, 1e-2, 0.5]),
    weight_decay=st.sampled_from([0.0, 0.01, 0.5]),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_lamb_steps_as_the_original_code(
    shapes: list[list[int]], lr: float, weight_decay: float, seed: int, data: st.DataObject
) -> None:
    """Initial weights can be 0, and so can the gradients of any step."""
    scales = st.sampled_from([0.0, 1e-8, 1.0, 100.0])
    params = [nn.Parameter(normal(s, seed + i) * data.draw(scales)) for i, s in enumerate(shapes)]
    names = [f"{i}.{'bias' if len(shape) == 1 else 'kernel'}" for i, shape in enumerate(shapes)]
    expected = [as_array(p) for p in params]
    original = TfLamb(learning_rate=lr, weight_decay_rate=weight_decay)
    optimizer = Lamb(params, lr=lr, weight_decay=weight_decay)
    for step in range(data.draw(st.integers(1, 12))):
        for i, p in enumerate(params):
            p.grad = normal(p.shape, 7 * seed + 100 * step + i) * data.draw(scales)
            expected[i] = original.next_param(names[i], expected[i], as_array(p.grad))
        optimizer.step()
    for p, array in zip(params, expected, strict=True):
        np.testing.assert_allclose(as_array(p), array, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("sharing", ["all", "none"])
def test_lamb_steps_a_model_as_the_original_code_which_selects_by_name(sharing: Sharing) -> None:
    """The original code excludes norms and biases by patterns, which Hugging Face's names match."""
    model = our_model(replace(TINY, sharing=sharing), JOINT_TASKS).double()
    weights = parameters(model)
    expected = {name: as_array(p) for name, p in weights.items()}
    original = TfLamb(learning_rate=0.02)
    optimizers = build_optimizers(
        model, OptimizerSettings(optimizer="lamb", lr=0.02, pooled_factor=1.0, weight_decay=0.01)
    )
    assert optimizers.metrics() == {}
    for step in range(3):
        original.ratios.clear()
        for number, (name, p) in enumerate(weights.items()):
            p.grad = None if number == 3 else normal(p.shape, 1000 * (step + 1) + number)
            if p.grad is not None:
                expected[name] = original.next_param(name, expected[name], as_array(p.grad))
        optimizers.step(1.0)
        mean_ratio = pytest.approx(np.mean(original.ratios))
        assert optimizers.metrics() == {"trust_ratio": mean_ratio}
    for name, p in weights.items():
        np.testing.assert_allclose(as_array(p), expected[name], rtol=1e-9, err_msg=name)


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
def test_the_linear_schedule_is_that_of_the_original_code(
    num_steps: int, data: st.DataObject
) -> None:
    num_warmup = data.draw(st.integers(0, num_steps))
    near = st.integers(max(0, num_warmup - 1), min(num_steps, num_warmup + 1))
    step = data.draw(st.integers(0, num_steps) | near)
    schedule = Schedule(kind="linear", warmup=num_warmup / num_steps)
    expected = tf_learning_rate(step, 0.00176, num_steps, num_warmup)
    assert 0.00176 * schedule.factor(step / num_steps) == pytest.approx(expected, abs=1e-12)


def test_the_wsd_schedule_warms_up_stays_constant_and_decays() -> None:
    """The first step has a rate above 0. By default, warm-up takes 3 % and decay 30 % of the run.

    The decay is 1 - sqrt.
    """
    schedule = Schedule(warmup=0.1, decay=0.4)
    factors = [schedule.factor(progress) for progress in (0.0, 0.05, 0.1, 0.6, 0.7, 1.0)]
    assert factors == pytest.approx([0.001, 0.5, 1.0, 1.0, 0.5, 0.0])
    factors = [Schedule().factor(progress) for progress in (0.015, 0.7, 0.775)]
    assert factors == pytest.approx([0.5, 1, 0.5])
    Schedule(warmup=0.5, decay=0.5)
    Schedule(kind="linear", warmup=0.5, decay=0.6)  # ignores `decay`
    with pytest.raises(OptimizerError, match="whose sum is at most 1"):
        Schedule(warmup=0.5, decay=0.51)


@pytest.mark.parametrize("optimizer", NAMES)
def test_layer_matrices_pooled_heads_and_other_parameters_have_separate_rates(
    model: AlbertForTasks, optimizer: OptimizerName
) -> None:
    """No parameter has two rates."""
    options = OptimizerSettings(optimizer=optimizer, lr=2.0, adamw_lr=1.0, pooled_factor=0.25)
    parts = build_optimizers(model, options).parts
    groups = [group for part in parts for group in part.param_groups]
    pairs = [(id(p), group["peak_lr"]) for group in groups for p in group["params"]]
    rates = dict(pairs)
    assert len(rates) == len(pairs)
    other_rate = 1.0 if optimizer == "muon" else 2.0
    for name, parameter in model.named_parameters():
        if name.startswith("albert.encoder") and parameter.ndim == 2:
            assert rates[id(parameter)] == 2.0, name
        elif name.startswith(("pooler", "heads.sentence-order")):
            assert rates[id(parameter)] == other_rate / 4, name
        else:
            assert rates[id(parameter)] == other_rate, name


def set_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)


def test_adamw_steps_as_plain_adamw_without_decay_of_norms_or_biases(
    model: AlbertForTasks,
) -> None:
    """The rate is a third of the peak rate."""
    copy = our_model(TINY, ("fill-mask", "sentence-order"))
    groups = [[p for p in copy.parameters() if (p.ndim == 2) == decays] for decays in (True, False)]
    plain = torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": 0.2}, {"params": groups[1], "weight_decay": 0.0}],
        lr=0.01,
        betas=(0.9, 0.98),
        eps=1e-6,
        foreach=False,
    )
    ours = build_optimizers(
        model, OptimizerSettings(optimizer="adamw", lr=0.03, pooled_factor=1.0, weight_decay=0.2)
    )
    for step in range(5):
        set_gradients(model, step)
        set_gradients(copy, step)
        ours.step(1 / 3)
        plain.step()
    for (name, weight), expected in zip(model.named_parameters(), copy.parameters(), strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("optimizer", NAMES)
def test_a_restored_state_gives_identical_steps(optimizer: OptimizerName) -> None:
    """The state includes the learning rates: those of the new optimizers are replaced."""
    weights: list[dict[str, Tensor]] = []
    for is_interrupted in (False, True):
        model = our_model(TINY, ("sentence-order",))
        optimizers = build_optimizers(model, OptimizerSettings(optimizer=optimizer, lr=0.02))
        for step in range(4):
            if is_interrupted and step == 2:
                file = io.BytesIO()
                torch.save(optimizers.state_dict(), file)
                file.seek(0)
                weights_at_stop = model.state_dict()
                model = our_model(TINY, ("sentence-order",), seed=5)
                model.load_state_dict(weights_at_stop)
                optimizers = build_optimizers(model, OptimizerSettings(optimizer=optimizer, lr=0.9))
                optimizers.load_state_dict(torch.load(file, weights_only=True))
            set_gradients(model, step)
            optimizers.step(1 / (step + 1))
        weights.append(model.state_dict())
    for name, weight in weights[0].items():
        assert torch.equal(weight, weights[1][name]), name


# Square, wide and tall matrices, a single row and a single column.
SHAPES: Final = [(24, 24), (24, 40), (40, 24), (1, 7), (7, 1)]


def make_matrices() -> list[nn.Parameter]:
    return [nn.Parameter(normal(shape, seed).float()) for seed, shape in enumerate(SHAPES)]


def train(optimizer: Optimizer) -> None:
    """Train five steps with different rates and sizes of the gradients."""
    for step in range(5):
        for group in optimizer.param_groups:
            group["lr"] = 0.02 / (step + 1)
            for number, parameter in enumerate(group["params"]):
                grad = normal(parameter.shape, 100 * step + number).float()
                parameter.grad = grad * 10.0 ** (step - 2)
        optimizer.step()


@pytest.mark.parametrize(
    ("has_bf16", "rounding"),
    [pytest.param(True, 2**-8, id="bf16"), pytest.param(False, 0.03, id="fp32")],
)
def test_muon_steps_as_muon_of_torch(
    has_bf16: bool, rounding: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16, the total change differs by one rounding at most.

    In fp32, it differs by more, because torch's Muon computes in bf16 and its rounding adds up.
    """
    pretend_bf16(monkeypatch, has_bf16)
    initial, our_matrices, theirs = make_matrices(), make_matrices(), make_matrices()
    train(Muon(our_matrices, lr=0.02, weight_decay=0.3))
    train(torch.optim.Muon(theirs, lr=0.02, weight_decay=0.3, adjust_lr_fn="match_rms_adamw"))
    for start, ours, expected in zip(initial, our_matrices, theirs, strict=True):
        assert (ours - expected).norm() < rounding * (expected - start).norm(), ours.shape
