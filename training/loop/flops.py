"""FLOPs of a token in pretraining, peak FLOPs of the device, and model FLOPs utilisation (MFU)."""

from __future__ import annotations

import re
import time
from typing import Final

import torch

from albert_serve.config import AlbertConfig
from training.system.precision import PrecisionName, product_dtype

# Data sheets: dense products in bf16 (fp16 on V100 and T4, which have no bf16), floating-point
# operations a second. The device's name must have all words of a key; the first match counts.
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
# A product that takes less time than this is repeated at twice the size.
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
    """Return the FLOPs per token of the matrix products of the forward and backward pass.

    Three times the forward pass, since each product has two in the backward pass; 2 operations
    for each multiply-add, of which a real token has

        E*H                          the map of embeddings to hidden states
        + n * (4H² + 2HF + 2HS)      n applications of a layer; 2HS are the attention's scores and
                                     sums over a sequence of S tokens
        - (1 - read) * (H² + 2HF)    where the last layer, after its attention, is applied to the
                                     gathered positions only
        + masked * (HE + EV)         fill-mask, at the masked tokens alone
        + (H² + HK) / S              pooler and sentence head of K outputs, once a sequence

    Lookups, norms, activations and softmax are not counted, nor are padding and recomputed
    activations.

    Args:
        length: S, real tokens of a sequence. For sequences of several lengths give the mean over
            their tokens, the sum of squares over the sum.
        masked_rate: fraction of the tokens that is predicted.
        read_rate: fraction of the positions that is gathered; 1 where all are computed.
        num_sentence_outputs: K; 0 for a run without a sentence task, which has no pooler either.
    """
    e, h, f, v = config.embedding_size, config.hidden_size, config.ffn_size, config.vocab_size
    layers = len(config.layer_plan) * (4 * h * h + 2 * h * f + 2 * h * length)
    layers -= (1 - read_rate) * (h * h + 2 * h * f)
    fill_mask = masked_rate * (h * e + e * v)
    sentence = (h * h + h * num_sentence_outputs) / length if num_sentence_outputs else 0.0
    return 3 * 2 * (e * h + layers + fill_mask + sentence)


def mfu(*, tokens_per_s: float, flops_per_token: float, peak_flops: float) -> float:
    """Return the model FLOPs utilisation: the model's own FLOPs as a fraction of the peak.

    As defined for PaLM (Chowdhery et al. 2022, appendix B). For several devices give the sum of
    their peaks.
    """
    return tokens_per_s * flops_per_token / peak_flops


def peak_flops(device: torch.device, precision: PrecisionName = "auto") -> float:
    """Return the peak dense FLOPs a second of the device, in training's precision.

    For GPUs in the table it is the data sheet's. For other devices it is the best speed of square
    products within half a second, on a CPU with torch's current number of threads: MFU is then
    relative to a plain product, which overstates it. Random state is unchanged.
    """
    if device.type == "cuda":
        known = data_sheet_flops(torch.cuda.get_device_name(device))
        if known is not None:
            return known
    return _measured_flops(device, precision)


def data_sheet_flops(name: str) -> float | None:
    """Return the peak of the GPU of that name; None for one that the table lacks."""
    words = set(re.split(r"[\s-]+", name))
    if "MIG" in words:  # a part of a GPU
        return None
    return next((peak for key, peak in _DATA_SHEETS.items() if words.issuperset(key)), None)


def _measured_flops(device: torch.device, precision: PrecisionName) -> float:
    """Measure the best speed of square products of `product_dtype`."""
    best, size, began = 0.0, _SMALLEST, time.perf_counter()
    generator, dtype = torch.Generator(device).manual_seed(0), product_dtype(device, precision)
    while not best or time.perf_counter() - began < _MEASURE_S:
        matrix = torch.randn(size, size, dtype=dtype, device=device, generator=generator)
        for _ in range(2):  # the first of a size is a warm-up
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
