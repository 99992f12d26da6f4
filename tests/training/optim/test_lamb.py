"""LAMB makes the steps of the original code, on whole and on sharded parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.multiprocessing.spawn import spawn

from albert_serve.config import AlbertConfig, Sharing
from training.model.checkpoint import parameters
from training.model.heads import AlbertForTasks, Task
from training.optim.lamb import Lamb
from training.optim.optimizers import OptimizerName, OptimizerSettings, build_optimizers

Array: TypeAlias = "NDArray[np.float64]"

# Of no multiple of two, so that shards differ in size, and one of a single row.
ODD: Final = AlbertConfig(
    vocab_size=51,
    embedding_size=9,
    hidden_size=15,
    num_layers=4,
    num_heads=3,
    ffn_size=21,
    max_positions=7,
)
SHARDED: Final[tuple[OptimizerName, ...]] = ("lamb", "adamw")
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
        {"fill-mask": ODD.vocab_size, "sentence-order": 2},
        {"text-classification": 3, "question-answering": 2},
        {"multiple-choice": 1},
    ],
    ids=["pretraining", "finetuning", "choice"],
)
def test_a_model_steps_as_the_original_which_leaves_out_by_name(
    sharing: Sharing, tasks: Mapping[Task, int]
) -> None:
    """Its names are Hugging Face's here, where norms and biases have the same patterns."""
    model = odd_model(tasks, sharing)
    weights = parameters(model)
    expected = {name: as_array(p) for name, p in weights.items()}
    original = TfLamb(learning_rate=0.02)
    optimizers = build_optimizers(
        model, OptimizerSettings(name="lamb", lr=0.02, pooled_factor=1.0, weight_decay=0.01)
    )
    for step in range(NUM_STEPS):
        set_gradients(model, step)
        for name, p in weights.items():
            if p.grad is not None:
                expected[name] = original.next_param(name, expected[name], as_array(p.grad))
        optimizers.step(1.0)
    for name, p in weights.items():
        np.testing.assert_allclose(as_array(p), expected[name], rtol=1e-9, err_msg=name)


def test_ratios_are_those_of_the_last_step() -> None:
    moved, still, bias = (nn.Parameter(torch.full(shape, 2.0)) for shape in [(2, 2), (2, 2), (2,)])
    optimizer = Lamb([{"params": [moved, bias]}, {"params": [still]}], weight_decay=0.0)
    assert optimizer.trust_ratios() is None
    moved.grad, bias.grad = torch.ones(2, 2), torch.ones(2)
    optimizer.step()
    ratios = optimizer.trust_ratios()
    assert ratios is not None
    # |w| is 4, and each of the four elements of u is 0.1 over the root of 0.001.
    assert ratios.tolist() == pytest.approx([4 / (2 * 0.1 / 0.001**0.5)], rel=1e-4)
    moved.grad, still.grad = torch.zeros(2, 2), torch.zeros(2, 2)
    optimizer.step()
    ratios = optimizer.trust_ratios()
    assert ratios is not None
    assert ratios.shape == (2,)
    assert ratios[1] == 1
    optimizer.zero_grad()
    optimizer.step()
    assert optimizer.trust_ratios() is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": -1.0}, "lr -1.0: give a finite number from 0"),
        ({"lr": float("nan")}, "lr nan"),
        ({"weight_decay": float("inf")}, "weight_decay inf"),
        ({"eps": 0.0}, "eps 0.0: give a finite number above 0"),
        ({"betas": (0.9, 1.0)}, r"betas \(0.9, 1.0\)"),
        ({"betas": (-0.1, 0.9)}, "betas"),
    ],
)
def test_settings_out_of_range_are_refused(changes: dict[str, Any], message: str) -> None:
    weight = nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match=message):
        Lamb([weight], **changes)
    with pytest.raises(ValueError, match=message):
        Lamb([{"params": [weight], **changes}])


def odd_model(tasks: Mapping[Task, int], sharing: Sharing = "all") -> AlbertForTasks:
    model = AlbertForTasks(replace(ODD, sharing=sharing), tasks).double()
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(normal(p.shape, i))
    return model


def set_gradients(model: nn.Module, step: int) -> None:
    """Those of every parameter but one; one is zero at first."""
    for i, p in enumerate(model.parameters()):
        grad = normal(p.shape, 1000 * (step + 1) + i) * (0 if i == 5 and step == 0 else 1)
        if isinstance(p, DTensor):
            grad = distribute_tensor(grad, p.device_mesh, p.placements)
        p.grad = None if i == 3 else grad


def train(name: OptimizerName, mesh: DeviceMesh | None = None) -> dict[str, Tensor]:
    """The weights after three steps, the last with a state that was taken and given back."""
    model = odd_model({"fill-mask": ODD.vocab_size, "sentence-order": 2, "multiple-choice": 1})
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    optimizer_settings = OptimizerSettings(name=name, lr=0.02, pooled_factor=0.5)
    optimizers = build_optimizers(model, optimizer_settings)
    for step in range(NUM_STEPS):
        if step == NUM_STEPS - 1:
            saved, optimizers = optimizers.state_dict(), build_optimizers(model, optimizer_settings)
            optimizers.load_state_dict(saved)
        set_gradients(model, step)
        optimizers.step(0.5)
    weights = {
        name: p.full_tensor() if isinstance(p, DTensor) else p.detach()
        for name, p in model.named_parameters()
    }
    return {**weights, "figures": torch.tensor(list(optimizers.figures().values()))}


def train_sharded(rank: int, folder: Path) -> None:
    """Runs in a process of its own."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=2,
        timeout=timedelta(minutes=2),
    )
    mesh = init_device_mesh("cpu", (2,))
    torch.save({name: train(name, mesh) for name in SHARDED}, folder / f"{rank}.pt")
    distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_with_half_of_each_weight_step_as_one_with_all(tmp_path: Path) -> None:
    """With rows that do not divide by two, and a matrix of a single row."""
    spawn(train_sharded, (tmp_path,), nprocs=2)  # type: ignore[no-untyped-call]
    expected = {name: train(name) for name in SHARDED}
    assert expected["lamb"]["figures"].numel() == 1
    for rank in range(2):
        state = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        for name in SHARDED:
            assert state[name].keys() == expected[name].keys()
            for key, tensor in expected[name].items():
                torch.testing.assert_close(
                    state[name][key], tensor, rtol=1e-12, atol=0, msg=f"{name} {key}"
                )
