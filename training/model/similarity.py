"""Distance of each layer's input and output embeddings (Figure 1 of the paper).

Shape legend: B rows, S positions, H hidden size, R real tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
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
    device = next(model.parameters()).device
    num_layers, num_tokens = len(model.config.layer_plan), 0
    distance, angle = [0.0] * num_layers, [0.0] * num_layers
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            for batch in batches:
                moved = batch.to(device)
                real_BS = moved.real_BS
                num_tokens += int(real_BS.sum())
                rows = (state_BSH[real_BS].float() for state_BSH in model.albert.states(moved))
                for layer, (before_RH, after_RH) in enumerate(pairwise(rows)):
                    distance[layer] += float((after_RH - before_RH).norm(dim=-1).sum())
                    angle[layer] += float(_angle_degrees(before_RH, after_RH).sum())
    finally:
        model.train(was_training)
    if not num_tokens:
        raise TrainingError("there is no token to compare layers at; give a batch that has some")
    return LayerSimilarity(
        distance=tuple(total / num_tokens for total in distance),
        angle_degrees=tuple(total / num_tokens for total in angle),
    )


def _angle_degrees(x_RH: Tensor, y_RH: Tensor) -> Tensor:
    """Return the angles (R,) of rows; the arc cosine would round small ones away."""
    x_RH, y_RH = F.normalize(x_RH, dim=-1), F.normalize(y_RH, dim=-1)
    difference_R, sum_R = (x_RH - y_RH).norm(dim=-1), (x_RH + y_RH).norm(dim=-1)
    return 2 * torch.atan2(difference_R, sum_R) * (180 / math.pi)
