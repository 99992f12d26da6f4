"""The formula counts what torch counts, and peaks are those of the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from albert_serve.compute import train_flops_per_token
from albert_serve.config import AlbertConfig
from benchmarks.harness.flops import data_sheet_flops
from tests.training.support import TINY, our_model
from training.model.albert import ModelInputs

CONFIGS: dict[str, AlbertConfig] = {
    "shared": TINY,
    "narrow feed-forward": replace(TINY, ffn_size=8),
    "inner": replace(TINY, num_inner_layers=3),
    "groups": replace(TINY, num_groups=2, num_inner_layers=2),
    "sharing nothing": replace(TINY, sharing="none"),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(("length", "num_masked"), [(16, 3), (7, 7), (1, 1)])
def test_the_flops_of_a_token_are_those_that_torch_counts(
    config: AlbertConfig, length: int, num_masked: int
) -> None:
    """In a forward and backward pass over one sequence."""
    model: Any = our_model(config, ("fill-mask", "sentence-order")).train()
    ids = torch.arange(length)[None] % config.vocab_size
    with FlopCounterMode(display=False) as counter:
        hidden_BSH = model(ModelInputs(ids=ids, types=torch.zeros_like(ids)))
        loss = model.logits("fill-mask", hidden_BSH[0, :num_masked]).sum()
        (loss + model.logits("sentence-order", hidden_BSH[:, 0]).sum()).backward()
    formula = train_flops_per_token(config, length=length, masked_rate=num_masked / length)
    assert formula * length == pytest.approx(counter.get_total_flops(), rel=1e-12)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_last_layer_is_paid_for_the_tokens_that_are_read(config: AlbertConfig) -> None:
    model: Any = our_model(config, ("fill-mask",)).train()
    ids = torch.arange(16)[None]
    with FlopCounterMode(display=False) as counter:
        hidden_RH = model(
            ModelInputs(ids=ids, types=torch.zeros_like(ids)), torch.tensor([2, 5, 9, 0])
        )
        model.logits("fill-mask", hidden_RH).sum().backward()
    formula = train_flops_per_token(
        config, length=16, masked_rate=0.25, num_sentence_outputs=0, read_rate=0.25
    )
    assert formula * 16 == pytest.approx(counter.get_total_flops(), rel=1e-12)


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", None),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_the_peaks_of_data_sheets(name: str, teraflops: float | None) -> None:
    flops = data_sheet_flops(name)
    assert flops == (None if teraflops is None else pytest.approx(teraflops * 1e12))
