"""Distance of each layer's input and output embeddings (Figure 1 of the paper).

Shape legend: B rows, S positions, H hidden size, R real tokens, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from training.errors import TrainingError
from training.model.albert import ModelInputs
from training.model.heads import AlbertForTasks


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSimilarity:
    """Comparison of each layer's input and output, as in Figure 1 of the paper (section 3.1).

    There is one value for each entry of the config's `layer_plan`, that is for each application
    of a layer.

    Attributes:
        distance: mean L2 distance of a token's input and output embedding.
        angle_degrees: mean angle between both, from 0 to 180; the figure's "cosine similarity (in
            terms of degree)".
    """

    distance: tuple[float, ...]
    angle_degrees: tuple[float, ...]


def layer_similarity(model: AlbertForTasks, batches: Iterable[ModelInputs]) -> LayerSimilarity:
    """Run the batches, without dropout and gradients, and compare at their real tokens.

    Parameters, gradients, random state and the model's mode are unchanged.

    Args:
        batches: on any device. Some thousand tokens are enough.

    Raises:
        TrainingError: the batches have no real token.
    """
    device, was_training = next(model.parameters()).device, model.training

    def states(batch: ModelInputs) -> Iterator[Tensor]:
        moved = batch.to(device)
        real_BS = moved.real_BS
        return (state_BSH[real_BS].float() for state_BSH in model.albert.states(moved))

    model.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            return compare_layers(map(states, batches))
    finally:
        model.train(was_training)


def compare_layers(states: Iterable[Iterable[Tensor]]) -> LayerSimilarity:
    """Compare the inputs and outputs of layers.

    Args:
        states: of each batch the hidden states (R, H) before the first layer and after each.

    Raises:
        TrainingError: there is no token.
    """
    sums: list[Tensor] = []
    num_tokens = 0
    for rows in states:
        moves = [
            torch.stack([(after_RH - before_RH).norm(dim=-1), _angle_degrees(before_RH, after_RH)])
            for before_RH, after_RH in pairwise(rows)
        ]
        num_tokens += moves[0].shape[-1]
        sums.append(torch.stack(moves).double().sum(-1))
    if not num_tokens:
        raise TrainingError("there is no token to compare layers at; give a batch that has some")
    means_L2 = torch.stack(sums).sum(0) / num_tokens
    distance, angle = means_L2.T.tolist()
    return LayerSimilarity(distance=tuple(distance), angle_degrees=tuple(angle))


def _angle_degrees(x_RH: Tensor, y_RH: Tensor) -> Tensor:
    """Return the angles (R,) of rows; the arc cosine would round small ones away."""
    x_RH, y_RH = F.normalize(x_RH, dim=-1), F.normalize(y_RH, dim=-1)
    difference_R, sum_R = (x_RH - y_RH).norm(dim=-1), (x_RH + y_RH).norm(dim=-1)
    return 2 * torch.atan2(difference_R, sum_R) * (180 / math.pi)
