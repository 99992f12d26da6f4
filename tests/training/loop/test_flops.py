"""The formula counts what torch counts, and peaks are those of the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from albert_serve.config import AlbertConfig
from tests.training.support import TINY, our_model
from training.loop.flops import (
    data_sheet_flops,
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
