"""The formula counts what torch counts, and peaks are those of the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from albert_serve.config import PRESETS, AlbertConfig
from tests.training.support import TINY, our_model, pretend_bf16
from training.loop.flops import (
    data_sheet_flops,
    measured_flops,
    mfu,
    peak_flops,
    train_flops_per_token,
)
from training.model.albert import Batch
from training.model.heads import Task

CONFIGS: dict[str, AlbertConfig] = {
    "shared": TINY,
    "narrow feed-forward": replace(TINY, ffn_size=8),
    "inner": replace(TINY, num_inner_layers=3),
    "groups": replace(TINY, num_groups=2, num_inner_layers=2),
    "sharing nothing": replace(TINY, sharing="none"),
}


def counted_flops(
    config: AlbertConfig, *, length: int, num_masked: int, tasks: tuple[Task, ...]
) -> float:
    """The FLOPs that torch counts in a forward and backward pass over one sequence."""
    model: Any = our_model(config, tasks).train()
    ids = torch.arange(length)[None] % config.vocab_size
    with FlopCounterMode(display=False) as counter:
        hidden_BSH = model(Batch(ids=ids, types=torch.zeros_like(ids)))
        loss = model.logits("fill-mask", hidden_BSH[0, :num_masked]).sum()
        if "sentence-order" in tasks:
            loss = loss + model.logits("sentence-order", hidden_BSH[:, 0]).sum()
        loss.backward()
    return float(counter.get_total_flops())


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(("length", "num_masked"), [(16, 3), (7, 7), (1, 1)])
def test_the_flops_of_a_token_are_those_that_torch_counts(
    config: AlbertConfig, length: int, num_masked: int
) -> None:
    counted = counted_flops(
        config, length=length, num_masked=num_masked, tasks=("fill-mask", "sentence-order")
    )
    formula = train_flops_per_token(config, length=length, masked_rate=num_masked / length)
    assert formula * length == pytest.approx(counted, rel=1e-12)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_last_layer_is_paid_for_the_tokens_that_are_read(config: AlbertConfig) -> None:
    model: Any = our_model(config, ("fill-mask",)).train()
    ids = torch.arange(16)[None]
    with FlopCounterMode(display=False) as counter:
        hidden_RH = model(Batch(ids=ids, types=torch.zeros_like(ids)), torch.tensor([2, 5, 9, 0]))
        model.logits("fill-mask", hidden_RH).sum().backward()
    formula = train_flops_per_token(
        config, length=16, masked_rate=0.25, num_sentence_outputs=0, read_rate=0.25
    )
    assert formula * 16 == pytest.approx(counter.get_total_flops(), rel=1e-12)


def test_without_a_sentence_task_there_is_no_pooler() -> None:
    counted = counted_flops(TINY, length=8, num_masked=2, tasks=("fill-mask",))
    formula = train_flops_per_token(TINY, length=8, masked_rate=0.25, num_sentence_outputs=0)
    assert formula * 8 == pytest.approx(counted, rel=1e-12)


def test_sequences_of_several_lengths_have_one_that_stands_for_them() -> None:
    """All but the sentence head, which is once a sequence and next to nothing."""
    lengths = [3, 5, 16, 9]
    counted = sum(
        counted_flops(TINY, length=length, num_masked=1, tasks=("fill-mask",)) for length in lengths
    )
    formula = train_flops_per_token(
        TINY,
        length=sum(length**2 for length in lengths) / sum(lengths),
        masked_rate=len(lengths) / sum(lengths),
        num_sentence_outputs=0,
    )
    assert formula * sum(lengths) == pytest.approx(counted, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "length", "billions"),
    [
        ("base", 128, 0.528),
        ("base", 512, 0.570),
        ("large", 512, 1.967),
        ("xlarge", 512, 7.555),
        ("xxlarge", 512, 14.805),
    ],
)
def test_the_models_of_the_paper(name: str, length: int, billions: float) -> None:
    flops = train_flops_per_token(PRESETS[name], length=length, masked_rate=0.15)
    assert flops / 1e9 == pytest.approx(billions, abs=5e-4)


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("Tesla V100-SXM2-16GB", 125),
        ("Tesla V100-PCIE-32GB", 112),
        ("Tesla T4", 65),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", None),
        ("NVIDIA GeForce GTX 1080", None),
        ("", None),
    ],
)
def test_the_peaks_of_data_sheets(name: str, teraflops: float | None) -> None:
    flops = data_sheet_flops(name)
    assert flops == (None if teraflops is None else pytest.approx(teraflops * 1e12))


def test_the_peak_of_a_cpu_is_the_best_product_that_was_run() -> None:
    random_state = torch.get_rng_state()
    with FlopCounterMode(display=False) as counter:
        peak = measured_flops(torch.device("cpu"), duration_s=0.1)
    assert counter.get_total_flops() >= 2 * 2 * 256**3
    assert 1e6 < peak < 1e15
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.parametrize(("has_bf16", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_the_peak_of_a_cpu_is_that_of_training_s_precision(
    has_bf16: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products that take as long as their size says; the best is found among those of a type."""
    pretend_bf16(monkeypatch, has_bf16)
    multiplied: set[torch.dtype] = set()

    def product_s(matrix: torch.Tensor) -> float:
        multiplied.add(matrix.dtype)
        return 2 * len(matrix) ** 3 / 1e12

    monkeypatch.setattr("training.loop.flops._product_s", product_s)
    assert peak_flops(torch.device("cpu")) == pytest.approx(1e12)
    assert multiplied == {dtype}


def test_at_least_one_product_is_run() -> None:
    assert measured_flops(torch.device("cpu"), duration_s=0.0) > 1e6


def test_a_gpu_that_the_table_names_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name alone is made up: whether there is a GPU is the machine's affair."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert peak_flops(torch.device("cuda")) == 989.4e12


def test_utilisation_is_the_part_of_the_peak() -> None:
    figures: dict[str, Any] = {"tokens_per_s": 694e3, "flops_per_token": 0.57e9}
    assert mfu(**figures, peak_flops=989.4e12) == pytest.approx(0.4, abs=1e-3)
    assert mfu(**figures, peak_flops=2 * 989.4e12) == pytest.approx(0.2, abs=1e-3)
