"""What a token of pretraining costs, what the device can do, and which part of it is used (MFU)."""

from __future__ import annotations

import re
import time
from typing import Final

import torch

from albert_serve.config import AlbertConfig
from training.precision import product_dtype

# Data sheets: dense products in bf16 (fp16 on V100 and T4, which have no bf16), floating-point
# operations a second. All words must stand in the device's name; the first that fits counts.
_DATA_SHEETS: Final[dict[tuple[str, ...], float]] = {
    ("GB200",): 2500e12,
    ("B200",): 2250e12,
    ("GH200",): 989.4e12,
    ("H200", "NVL"): 835.5e12,
    ("H200",): 989.4e12,
    ("H100", "NVL"): 835.5e12,
    ("H100", "PCIe"): 756e12,
    ("H100",): 989.4e12,
    ("A100",): 312e12,
    ("A40",): 149.7e12,
    ("A30",): 165e12,
    ("A10",): 125e12,
    ("L40S",): 362e12,
    ("L40",): 181e12,
    ("L4",): 121e12,
    ("V100", "PCIE"): 112e12,
    ("V100",): 125e12,
    ("T4",): 65e12,
}
_MEASURE_S: Final = 0.5
# A product of this time is long enough; a smaller one is repeated at twice the size.
_PRODUCT_S: Final = 0.02
_SMALLEST: Final = 256
_LARGEST: Final = 8192


def train_flops_per_token(
    config: AlbertConfig,
    *,
    length: float,
    masked_rate: float,
    num_sentence_outputs: int = 2,
    read_rate: float = 1.0,
) -> float:
    """Floating-point operations of the matrix products of forward and backward pass, a token.

    Three times the forward pass, since a product has two in its backward pass, of 2 operations
    for each multiplication with its addition, of which a real token has

        E*H                          the map of embeddings to hidden states
        + n * (4H² + 2HF + 2HS)      n applications of a layer; 2HS are the attention's scores and
                                     sums over a sequence of S tokens
        - (1 - read) * (H² + 2HF)    where the last layer, past its attention, is applied to those
                                     tokens alone that a head reads
        + masked * (HE + EV)         fill-mask, at the masked tokens alone
        + (H² + HK) / S              pooler and sentence head of K outputs, once a sequence

    Lookups, norms, activations and softmax are not counted; nor is what an implementation adds:
    padding, and activations that are computed twice to save memory.

    Args:
        length: S, real tokens of a sequence. For sequences of several lengths give the one that
            their tokens see on average, the sum of squares over the sum.
        masked_rate: part of the tokens that is predicted.
        read_rate: part of the tokens whose hidden state is read; 1 where all are computed.
        num_sentence_outputs: K; 0 for a run without a sentence task, which has no pooler either.
    """
    e, h, f, v = config.embedding_size, config.hidden_size, config.ffn_size, config.vocab_size
    layers = len(config.layer_plan) * (4 * h * h + 2 * h * f + 2 * h * length)
    layers -= (1 - read_rate) * (h * h + 2 * h * f)
    fill_mask = masked_rate * (h * e + e * v)
    sentence = (h * h + h * num_sentence_outputs) / length if num_sentence_outputs else 0.0
    return 3 * 2 * (e * h + layers + fill_mask + sentence)


def mfu(*, tokens_per_s: float, flops_per_token: float, peak_flops: float) -> float:
    """Model FLOPs utilisation: the part of the peak that the model's own products take.

    The term is that of PaLM (Chowdhery et al. 2022, appendix B). For several devices give the
    sum of their peaks. It means as much as the peak does; see `peak_flops`.
    """
    return tokens_per_s * flops_per_token / peak_flops


def peak_flops(device: torch.device) -> float:
    """Floating-point operations a second that the device can do, dense, in training's precision.

    That of the data sheet for the GPUs that the table names. For others and for a CPU, whose data
    sheets do not say it, it is the best of half a second's square products, on a CPU by as many
    threads as torch uses now. Then MFU is the part of the speed of a plain product that training
    reaches, which is more than the part of what the hardware could do; and where the machine was
    busy while it was measured, MFU comes out too large. Random state stays as it is.
    """
    if device.type == "cuda":
        known = data_sheet_flops(torch.cuda.get_device_name(device))
        if known is not None:
            return known
    return measured_flops(device)


def data_sheet_flops(name: str) -> float | None:
    """The peak of a GPU that calls itself so; None for one that the table lacks.

    A part of a GPU (MIG) has no entry.
    """
    words = set(re.split(r"[\s-]+", name))
    if "MIG" in words:
        return None
    return next((peak for key, peak in _DATA_SHEETS.items() if words.issuperset(key)), None)


def measured_flops(device: torch.device, *, duration_s: float = _MEASURE_S) -> float:
    """The best speed of square products of `product_dtype` in that time, and of at least one."""
    best, size, began = 0.0, _SMALLEST, time.perf_counter()
    generator, dtype = torch.Generator(device).manual_seed(0), product_dtype(device)
    while not best or time.perf_counter() - began < duration_s:
        matrix = torch.randn(size, size, dtype=dtype, device=device, generator=generator)
        for _ in range(2):  # the first of a size also prepares
            seconds = _product_s(matrix)
            best = max(best, 2 * size**3 / seconds)
        if seconds < _PRODUCT_S and size < _LARGEST:
            size *= 2
    return best


def _product_s(matrix: torch.Tensor) -> float:
    _wait_for(matrix.device)
    began = time.perf_counter()
    matrix @ matrix
    _wait_for(matrix.device)
    return max(time.perf_counter() - began, 1e-9)


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
