"""The largest inputs of matrices, by which int8 smooths them.

Hidden states of [CLS] have channels of 10 to 50 times the others' size: before the feed-forward
part, between its matrices, and before the pooler.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from albert_serve.bundle.weights import layer_name, stored_name
from albert_serve.tokenizer import SpecialIds
from export.verify import random_batches, torch_batch
from training.model.heads import AlbertForTasks


@torch.inference_mode()
def largest_inputs(
    model: AlbertForTasks, special: SpecialIds, stored: Mapping[str, object]
) -> dict[str, NDArray[Any]]:
    """Return the largest absolute value of each input (I), by the stored name of the matrix.

    Random ids between special tokens do: they have the channels that real texts have.
    """
    largest: dict[str, NDArray[Any]] = {}

    def keep_largest(name: str, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        found_I = inputs[0].abs().flatten(0, -2).amax(0).numpy()
        largest[name] = np.maximum(largest.get(name, found_I), found_I)

    hooks = [
        linear.register_forward_pre_hook(partial(keep_largest, stored_name(name, stored)))
        for name, linear in _smoothed(model)
    ]
    for batch in random_batches(model.config, special):
        hidden_BSH = model.eval()(torch_batch(batch))
        if model.pooler is not None:
            model.pooler(hidden_BSH[:, 0])
    for hook in hooks:
        hook.remove()
    return largest


def _smoothed(model: AlbertForTasks) -> Iterator[tuple[str, nn.Module]]:
    """Yield the linear maps whose inputs are smoothed, by the names of their matrices.

    Those of attention have no such channels, and share one quantised input.
    """
    for number, ffn in enumerate(model.albert.encoder.ffns):
        prefix = layer_name(number, model.config)
        yield f"{prefix}.ffn.weight", ffn.get_submodule("up")
        yield f"{prefix}.ffn_output.weight", ffn.get_submodule("down")
    if model.pooler is not None:
        yield "albert.pooler.weight", model.pooler.get_submodule("dense")
