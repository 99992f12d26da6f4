"""How a model starts, beyond the paper's random weights.

From the paper's start a small ALBERT learns how frequent tokens are and to copy those that were
left in place, and then stands still: its attention is nearly even, what it carries is faint, and
nothing tells it what is near. The local start is that of an n-gram model: words and positions have
halves of the embedding of their own, and each head looks at one neighbour. All of it is ordinary
weights, free to move: the model stays an ALBERT. docs/decisions.md has the measurements.

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

Start = Literal["local", "random", "teacher"]
# Words and positions begin with like shares of an embedding, so that neither hides the other.
_AMPLITUDE: Final = 0.1
_WORD_STD: Final = _AMPLITUDE / math.sqrt(2)
# The fastest sinusoid, in radians a position: what tells direct neighbours apart.
_FASTEST: Final = 2.0
# Of queries and keys: some eight tenths of a head's attention in the first layers then go to its
# neighbour.
_GAIN: Final = math.sqrt(1.5)


def start_local(model: AlbertForTasks, token_counts: NDArray[np.int64]) -> None:
    """Let a model begin with its corpus' frequencies, and with attention to what is near.

    Args:
        model: freshly made, with a fill-mask head.
        token_counts: (V,) how often each token occurs in the corpus.
    """
    head = model.heads["fill-mask"]
    assert isinstance(head, FillMaskHead)
    frequencies_V = _frequencies(model.config.embedding_size // 4, model.config.max_positions)
    with torch.no_grad():
        use_counts(head, token_counts)
        _part_embeddings(model.albert.embeddings, frequencies_V)
        for block in model.albert.encoder.attentions:
            assert isinstance(block, Attention)
            _attend_to_neighbours(block, model.albert.embeddings, frequencies_V)


def use_counts(head: FillMaskHead, token_counts: NDArray[np.int64]) -> None:
    """Make the output bias the log frequencies, so that training starts at their entropy."""
    smoothed = token_counts + 1.0
    head.decoder.bias.copy_(torch.from_numpy(np.log(smoothed / smoothed.sum())))


def _frequencies(num_pairs: int, num_positions: int) -> Tensor:
    """Radians a position, from the fastest to half a turn over all positions; (P / 2,)."""
    slowest = math.pi / num_positions
    return torch.logspace(math.log10(_FASTEST), math.log10(slowest), num_pairs)


def _part_embeddings(embeddings: Embeddings, frequencies: Tensor) -> None:
    """Sinusoids in the first half of the embedding, words in the second, mapped to H unmixed."""
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
    """Let head 0 look one token back, head 1 one ahead, head 2 two back, and so on.

    A shift is a rotation of each pair of sinusoids, which is in the keys' weights. Values and
    output are orthogonal, so that what is looked at arrives in full.
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
    """The map that reads sinusoids as they were `offset` positions before."""
    angle = (frequencies * offset)[: len(waves_PH) // 2, None]
    sine, cosine = waves_PH[0::2], waves_PH[1::2]
    shifted = torch.empty_like(waves_PH)
    shifted[0::2] = sine * angle.cos() - cosine * angle.sin()
    shifted[1::2] = cosine * angle.cos() + sine * angle.sin()
    return shifted
