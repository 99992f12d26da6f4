"""Distance of each layer's input and output embeddings (Figure 1 of the paper).

Shape legend: B rows, S positions, H hidden size, R real tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from training.errors import TrainingError
from training.model.albert import Batch
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


def layer_similarity(model: AlbertForTasks, batches: Iterable[Batch]) -> LayerSimilarity:
    """Run the batches, without dropout and gradients, and compare at their real tokens.

    A compiled model runs eagerly and stays compiled, since hooks that are registered after
    compilation are not called. Parameters, gradients, random state and the model's mode are
    unchanged. Of a DistributedDataParallel model, give the `module`.

    Args:
        batches: on any device. Some thousand tokens are enough.

    Raises:
        TrainingError: the batches have no real token.
    """
    device = next(model.parameters()).device
    watch = _Watch(num_layers=len(model.config.layer_plan))
    with _measuring(model), watch.on(model.albert.encoder):
        for batch in batches:
            moved = batch.to(device)
            watch.begin(moved.real_BS)
            model.albert(moved)
    return watch.means()


@contextmanager
def _measuring(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode, without gradients and compiled code; for `with`."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


class _Watch:
    """Sums of distances and angles over tokens, for each application of a layer."""

    def __init__(self, *, num_layers: int) -> None:
        self._distance = [0.0] * num_layers
        self._angle = [0.0] * num_layers
        self._num_tokens = 0

    def begin(self, real_BS: Tensor) -> None:
        """Begin the next batch at the first layer."""
        self._real_BS = real_BS
        self._num_tokens += int(real_BS.sum())
        self._layer = 0

    @contextmanager
    def on(self, encoder: nn.Module) -> Iterator[None]:
        """Register hooks on each layer's input (attention) and output (feed-forward)."""
        handles: list[RemovableHandle] = []
        try:
            for attention in encoder.get_submodule("attentions").children():
                handles.append(attention.register_forward_pre_hook(self._enter))  # noqa: PERF401
            for ffn in encoder.get_submodule("ffns").children():
                handles.append(ffn.register_forward_hook(self._leave))  # noqa: PERF401
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._input_BSH: Tensor = inputs[0]

    def _leave(self, module: nn.Module, inputs: tuple[Any, ...], output_BSH: Tensor) -> None:
        before_RH = self._input_BSH[self._real_BS].float()
        after_RH = output_BSH[self._real_BS].float()
        self._distance[self._layer] += float((after_RH - before_RH).norm(dim=-1).sum())
        self._angle[self._layer] += float(_angle_degrees(before_RH, after_RH).sum())
        self._layer += 1

    def means(self) -> LayerSimilarity:
        if not self._num_tokens:
            raise TrainingError(
                "there is no token to compare layers at; give a batch that has some"
            )
        return LayerSimilarity(
            distance=tuple(total / self._num_tokens for total in self._distance),
            angle_degrees=tuple(total / self._num_tokens for total in self._angle),
        )


def _angle_degrees(x_RH: Tensor, y_RH: Tensor) -> Tensor:
    """Return the angles (R,) of rows; the arc cosine would round small ones away."""
    x_RH, y_RH = F.normalize(x_RH, dim=-1), F.normalize(y_RH, dim=-1)
    difference_R, sum_R = (x_RH - y_RH).norm(dim=-1), (x_RH + y_RH).norm(dim=-1)
    return 2 * torch.atan2(difference_R, sum_R) * (180 / math.pi)
