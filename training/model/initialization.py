"""Local initialization, an alternative to the paper's random weights.

From random weights, a small ALBERT learns token frequencies and to copy unmasked tokens, and then
stalls: its attention is nearly uniform, its outputs are small, and it does not distinguish
positions. The local start resembles an n-gram model: words and positions use separate halves of
the embedding, and each head attends to one neighbour. All of these are trainable weights of an
ordinary ALBERT. docs/decisions.md has the measurements.

Shape legend: V vocabulary, S positions, E embedding size, H hidden size, D head size, P sinusoids'
dimensions, half of E.
"""

from __future__ import annotations

import math
from typing import Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from training.model.albert import Attention, Embeddings
from training.model.heads import AlbertForTasks, FillMaskHead

Start = Literal["local", "random"]
# Words and positions start with equal norms, so that neither dominates an embedding.
_AMPLITUDE: Final = 0.1
_WORD_STD: Final = _AMPLITUDE / math.sqrt(2)
# Highest frequency in radians per position: it distinguishes direct neighbours.
_MAX_FREQUENCY: Final = 2.0
# Gain of queries and keys. It puts about 0.8 of a head's attention in the first layers on its
# neighbour.
_GAIN: Final = math.sqrt(1.5)


def start_local(model: AlbertForTasks, token_counts: NDArray[np.int64]) -> None:
    """Initialise a model with its corpus' token frequencies, and with attention to neighbours.

    Args:
        model: newly created model with a fill-mask head.
        token_counts: number of occurrences of each token in the corpus, (V,).
    """
    head = model.heads["fill-mask"]
    assert isinstance(head, FillMaskHead)
    frequencies_V = _frequencies(model.config.embedding_size // 4, model.config.max_positions)
    with torch.no_grad():
        # With this bias, the loss starts at the entropy of the token frequencies.
        smoothed = token_counts + 1.0
        head.decoder.bias.copy_(torch.from_numpy(np.log(smoothed / smoothed.sum())))
        _split_embeddings(model.albert.embeddings, frequencies_V)
        for block in model.albert.encoder.attentions:
            assert isinstance(block, Attention)
            _attend_to_neighbours(block, model.albert.embeddings, frequencies_V)


def _frequencies(num_pairs: int, num_positions: int) -> Tensor:
    """Return decreasing frequencies in radians per position, (P / 2,).

    The lowest frequency makes half a turn over all positions.
    """
    min_frequency = math.pi / num_positions
    return torch.logspace(math.log10(_MAX_FREQUENCY), math.log10(min_frequency), num_pairs)


def _split_embeddings(embeddings: Embeddings, frequencies: Tensor) -> None:
    """Set sinusoids in the first half, words in the second, and an orthogonal projection to H."""
    num_positions = embeddings.position.num_embeddings
    angle_SP = torch.arange(num_positions)[:, None] * frequencies.repeat_interleave(2)
    num_waves = angle_SP.shape[1]
    embeddings.position.weight.zero_()
    embeddings.position.weight[:, 0:num_waves:2] = _AMPLITUDE * angle_SP[:, 0::2].sin()
    embeddings.position.weight[:, 1:num_waves:2] = _AMPLITUDE * angle_SP[:, 1::2].cos()
    nn.init.trunc_normal_(embeddings.word.weight, std=_WORD_STD, a=-2 * _WORD_STD, b=2 * _WORD_STD)
    embeddings.word.weight[:, :num_waves] = 0
    nn.init.orthogonal_(embeddings.project.weight)


def _attend_to_neighbours(block: Attention, embeddings: Embeddings, frequencies: Tensor) -> None:
    """Let head 0 attend one token back, head 1 one ahead, head 2 two back, and so on.

    Rotating each pair of sinusoids in the keys' weights shifts the positions. The weights of
    values and output are orthogonal, so they preserve norms.
    """
    head_size = block.query.out_features // block.num_heads
    num_waves = min(2 * len(frequencies), head_size // 2 * 2)
    waves_PH = embeddings.project.weight[:, :num_waves].T
    block.query.weight.zero_()
    block.key.weight.zero_()
    for head in range(block.num_heads):
        offset = (head // 2 + 1) * (1 if head % 2 else -1)
        rows = slice(head * head_size, head * head_size + num_waves)
        block.query.weight[rows] = _GAIN * waves_PH
        block.key.weight[rows] = _GAIN * _shift(waves_PH, frequencies, offset)
    nn.init.orthogonal_(block.value.weight)
    nn.init.orthogonal_(block.output.weight)


def _shift(waves_PH: Tensor, frequencies: Tensor, offset: int) -> Tensor:
    """Return the map (P, H), rotated to read the sinusoids of `offset` positions earlier."""
    angle = (frequencies * offset)[: len(waves_PH) // 2, None]
    sine, cosine = waves_PH[0::2], waves_PH[1::2]
    shifted = torch.empty_like(waves_PH)
    shifted[0::2] = sine * angle.cos() - cosine * angle.sin()
    shifted[1::2] = cosine * angle.cos() + sine * angle.sin()
    return shifted
