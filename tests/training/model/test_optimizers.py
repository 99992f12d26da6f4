"""Steps are those of the original code and of torch, each weight at its own scheduled rate."""

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
from tests.training.support import TINY, TOGETHER, our_model, pretend_bf16
from training.model.heads import AlbertForTasks
from training.model.hf_names import parameters
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
def test_steps_are_those_of_the_original(
    shapes: list[list[int]], lr: float, weight_decay: float, seed: int, data: st.DataObject
) -> None:
    """Also from weights of zero, and with gradients of zero at any step."""
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
def test_a_model_steps_as_the_original_which_leaves_out_by_name(sharing: Sharing) -> None:
    """Its names are Hugging Face's here, where norms and biases have the same patterns."""
    model = our_model(replace(TINY, sharing=sharing), TOGETHER).double()
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
def test_the_linear_schedule_is_the_original_s(num_steps: int, data: st.DataObject) -> None:
    num_warmup = data.draw(st.integers(0, num_steps))
    near = st.integers(max(0, num_warmup - 1), min(num_steps, num_warmup + 1))
    step = data.draw(st.integers(0, num_steps) | near)
    schedule = Schedule(kind="linear", warmup=num_warmup / num_steps)
    expected = tf_learning_rate(step, 0.00176, num_steps, num_warmup)
    assert 0.00176 * schedule.factor(step / num_steps) == pytest.approx(expected, abs=1e-12)


def test_warm_up_constant_decay() -> None:
    """By 1 - sqrt, from a rate above 0 on; the default has 3 % and 30 % of the run."""
    progress = (0.0, 0.05, 0.1, 0.6, 0.7, 1.0)
    factors = [Schedule(warmup=0.1, decay=0.4).factor(each) for each in progress]
    assert factors == pytest.approx([0.001, 0.5, 1.0, 1.0, 0.5, 0.0])
    assert [Schedule().factor(each) for each in (0.015, 0.7, 0.775)] == pytest.approx([0.5, 1, 0.5])
    Schedule(warmup=0.5, decay=0.5)
    Schedule(kind="linear", warmup=0.5, decay=0.6)  # which has no such decay
    with pytest.raises(OptimizerError, match="whose sum is at most 1"):
        Schedule(warmup=0.5, decay=0.51)


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


# Square, wide, tall, and of a single row and column.
SHAPES: Final = [(24, 24), (24, 40), (40, 24), (1, 7), (7, 1)]


def make_matrices() -> list[nn.Parameter]:
    return [nn.Parameter(normal(shape, seed).float()) for seed, shape in enumerate(SHAPES)]


def train(optimizer: Optimizer, steps: Sequence[int]) -> None:
    """The steps of these numbers; sizes of gradients and rates differ from step to step."""
    for step in steps:
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
def test_muon_steps_as_torch_s_own(
    has_bf16: bool, rounding: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to a rounding of the way; in fp32 up to the several that torch's bf16 adds up."""
    pretend_bf16(monkeypatch, has_bf16)
    first, mine, theirs = make_matrices(), make_matrices(), make_matrices()
    train(Muon(mine, lr=0.02, weight_decay=0.3), range(5))
    train(
        torch.optim.Muon(theirs, lr=0.02, weight_decay=0.3, adjust_lr_fn="match_rms_adamw"),
        range(5),
    )
    for start, one, other in zip(first, mine, theirs, strict=True):
        assert (one - other).norm() < rounding * (other - start).norm(), one.shape
