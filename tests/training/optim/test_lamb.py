"""LAMB makes the steps of the original code."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

from albert_serve.config import Sharing
from tests.training.support import TINY, randomize
from training.model.heads import AlbertForTasks, Task
from training.model.hf_names import parameters
from training.optim.lamb import Lamb
from training.optim.optimizers import OptimizerSettings, build_optimizers

pytestmark = pytest.mark.process

Array: TypeAlias = "NDArray[np.float64]"

NUM_STEPS: Final = 3


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
@pytest.mark.parametrize(
    "tasks",
    [
        {"fill-mask": TINY.vocab_size, "sentence-order": 2},
        {"text-classification": 3, "question-answering": 2},
        {"multiple-choice": 1},
    ],
    ids=["pretraining", "finetuning", "choice"],
)
def test_a_model_steps_as_the_original_which_leaves_out_by_name(
    sharing: Sharing, tasks: Mapping[Task, int]
) -> None:
    """Its names are Hugging Face's here, where norms and biases have the same patterns."""
    model = AlbertForTasks(replace(TINY, sharing=sharing), tasks).double()
    randomize(model, 0)
    weights = parameters(model)
    expected = {name: as_array(p) for name, p in weights.items()}
    original = TfLamb(learning_rate=0.02)
    optimizers = build_optimizers(
        model, OptimizerSettings(optimizer="lamb", lr=0.02, pooled_factor=1.0, weight_decay=0.01)
    )
    for step in range(NUM_STEPS):
        for number, (name, p) in enumerate(weights.items()):
            p.grad = None if number == 3 else normal(p.shape, 1000 * (step + 1) + number)
            if p.grad is not None:
                expected[name] = original.next_param(name, expected[name], as_array(p.grad))
        optimizers.step(1.0)
    for name, p in weights.items():
        np.testing.assert_allclose(as_array(p), expected[name], rtol=1e-9, err_msg=name)
