"""How far each layer moves its embeddings: the figure that the paper tells oscillation by.

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
    """Input and output of each layer compared, as in Figure 1 of the paper (section 3.1).

    There is one value for each entry of the config's `layer_plan`: a layer counts as often as it
    is applied, and each layer of a group counts.

    Attributes:
        distance: mean L2 distance of a token's input and output embedding.
        angle_degrees: mean angle between both, from 0 to 180; the figure's "cosine similarity (in
            terms of degree)".
    """

    distance: tuple[float, ...]
    angle_degrees: tuple[float, ...]


def layer_similarity(model: AlbertForTasks, batches: Iterable[Batch]) -> LayerSimilarity:
    """Run the batches, without dropout and gradients, and compare at their real tokens.

    A compiled model is run eagerly and stays compiled: hooks that are set after compilation would
    never be called. Parameters, gradients, random state and the model's mode stay as they are.
    Wrapped in DistributedDataParallel, give its `module`.

    Args:
        batches: may lie on another device than the model. Some thousand tokens are enough.

    Raises:
        TrainingError: the batches hold no real token.
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
    """Evaluation mode without gradients, and what is compiled runs eagerly."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


class _Watch:
    """Sums over tokens of what each application of a layer did to them."""

    def __init__(self, *, num_layers: int) -> None:
        self._distance = [0.0] * num_layers
        self._angle = [0.0] * num_layers
        self._num_tokens = 0

    def begin(self, real_BS: Tensor) -> None:
        """Tell of the next batch; its first layer comes next."""
        self._real_BS = real_BS
        self._num_tokens += int(real_BS.sum())
        self._layer = 0

    @contextmanager
    def on(self, encoder: nn.Module) -> Iterator[None]:
        """Listen to a layer's two ends, its attention's input and its feed-forward's output."""
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


def _angle_degrees(one_RH: Tensor, other_RH: Tensor) -> Tensor:
    """Angles (R,) of rows; the arc cosine would lose small ones to rounding."""
    one_RH, other_RH = F.normalize(one_RH, dim=-1), F.normalize(other_RH, dim=-1)
    apart_R, along_R = (one_RH - other_RH).norm(dim=-1), (one_RH + other_RH).norm(dim=-1)
    return 2 * torch.atan2(apart_R, along_R) * (180 / math.pi)
