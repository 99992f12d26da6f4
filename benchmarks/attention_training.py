"""Comparison of attention in training on this CPU: torch's fused kernel and plain products.

    python benchmarks/attention_training.py

prints tokens/s of forward and backward passes of one small encoder with either, compiled, in
bf16 where the CPU has it, in turns, and the ratio of the medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from albert_serve.config import AlbertConfig
from training.model import albert
from training.model.albert import Albert, Batch
from training.system.precision import precision

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor]


def fused(
    query_BSND: Tensor, key_BSND: Tensor, value_BSND: Tensor, mask: Tensor | None, dropout: float
) -> Tensor:
    """Attention by torch's fused kernel, whatever the device; (B, S, N, D)."""
    query, key, value = (part.transpose(1, 2) for part in (query_BSND, key_BSND, value_BSND))
    read = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
    return read.transpose(1, 2)


def make_step(batch: Batch, config: AlbertConfig, attend: Attend) -> Callable[[], None]:
    """A compiled forward and backward pass over a fresh encoder with this attention."""
    compiled = torch.compile(Albert(config))

    def step() -> None:
        # The compiled code is for this attention alone: with another it would be made anew.
        with mock.patch.object(albert, "attend", attend), precision(torch.device("cpu")):
            loss = compiled(batch).float().square().mean()
        loss.backward()

    for _ in range(3):
        step()
    return step


def main() -> None:
    """Measure both in turns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    config = AlbertConfig(
        vocab_size=12000, hidden_size=384, num_layers=6, num_heads=6, ffn_size=1536
    )
    ids = torch.randint(5, config.vocab_size, (options.batch_size, options.length))
    lengths = torch.full(ids.shape[:1], options.length)
    batch = Batch(ids=ids, types=torch.zeros_like(ids), lengths=lengths)
    attentions = {"plain products": albert.attend, "fused kernel": fused}
    steps = {name: make_step(batch, config, attend) for name, attend in attentions.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.rounds):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    for name, median in medians.items():
        print(f"{name:16} {ids.numel() / median:8,.0f} tokens/s")
    print(f"plain / fused    {medians['fused kernel'] / medians['plain products']:8.2f}")


if __name__ == "__main__":
    main()
