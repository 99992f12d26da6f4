"""Dropout whose masks depend on the example and the step alone.

Torch draws the masks of a batch one after the other, so that an example's would depend on the
batch that it is in: on the size of micro-batches, and on the number of processes. Here each number
of a mask is a hash of its row's key and its column, so that nothing is drawn. It is the same to the
bit on every device, compiled or not, and in a backward pass that computes a layer again.

All keys are integers below 2^31, in int64: their products do not overflow.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

# The largest key.
MOST: Final = (1 << 31) - 1


def mixed(keys: Tensor) -> Tensor:
    """Hash keys, each by itself (the multiplications of a 32-bit finaliser, in 31 bits)."""
    keys = ((keys ^ (keys >> 15)) * 0x2C1B3C6D) & MOST
    keys = ((keys ^ (keys >> 12)) * 0x297A2D39) & MOST
    return keys ^ (keys >> 15)


def drop(x: Tensor, probability: float, rows: Tensor, columns: Tensor) -> Tensor:
    """Set numbers to 0 with a probability, and scale the others so that the mean stays.

    Args:
        rows, columns: keys, mixed, which broadcast to the shape of `x` together.
    """
    product = rows * columns
    uniform = (product ^ (product >> 31)) & MOST
    return (x * (1 / (1 - probability))).masked_fill(uniform < int(probability * (MOST + 1)), 0)


class Dropout(nn.Module):
    """Dropout of rows of numbers, each by the row's key.

    Args:
        site: tells the dropouts that one key goes through apart.
    """

    def __init__(self, probability: float, site: int) -> None:
        super().__init__()
        self.probability = probability
        self.site = site

    def forward(self, x: Tensor, keys: Tensor | None) -> Tensor:
        """Drop numbers of (..., H) in training, by the keys (...).

        Raises:
            ValueError: there are no keys in training.
        """
        if not self.training or self.probability == 0:
            return x
        if keys is None:
            raise ValueError("dropout needs the keys of the batch (`ModelInputs.keys`)")
        columns = mixed(torch.arange(1, x.shape[-1] + 1, device=x.device)) | 1
        rows = mixed((keys + self.site) & MOST) | 1
        return drop(x, self.probability, rows[..., None], columns)
