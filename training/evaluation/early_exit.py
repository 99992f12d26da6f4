"""Text classification by early exit: after each layer, and as soon as several layers agree.

Shape legend: N texts, L layers, K labels, C texts of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from albert_serve.progress import progress
from albert_serve.tasks.grouping import group_by_length
from training.data.batch import TokenisedExample, pad
from training.evaluation.metrics import metric_figures
from training.glue.tasks import Metric
from training.model.heads import AlbertForTasks

_TOKENS_A_BATCH: Final = 8192


@torch.inference_mode()
def logits_by_layer(
    model: AlbertForTasks, examples: Sequence[TokenisedExample]
) -> NDArray[np.float32]:
    """Return the logits (N, L, K) of texts after each layer of a model that has exits."""
    device = next(model.parameters()).device
    groups = group_by_length([len(example.ids) for example in examples], _TOKENS_A_BATCH)
    shape = (len(examples), model.config.num_layers, model.tasks["text-classification"])
    logits_NLK = np.empty(shape, np.float32)
    for group in progress(groups, title="texts", unit="batches"):
        batch = pad([(examples[index].ids, examples[index].types) for index in group]).to(device)
        firsts_C = torch.arange(len(group), device=device) * batch.ids.shape[1]
        logits_LCK = model.exit_logits(model.albert.rows_by_layer(batch, firsts_C))
        logits_NLK[list(group)] = logits_LCK.transpose(0, 1).float().cpu().numpy()
    return logits_NLK


def layers_used(logits_NLK: NDArray[np.float32], patience: int) -> NDArray[np.int64]:
    """Return the number of layers (N,) after which each text is answered.

    It is answered as soon as `patience` layers in a row predict the label of the layer before
    them, or after the last layer (PABEE, arXiv 2006.04152, section 3.2).
    """
    labels_NL = logits_NLK.argmax(-1)
    num_texts, num_layers = labels_NL.shape
    used_N = np.full(num_texts, num_layers)
    streak_N = np.zeros(num_texts, np.int64)
    for layer in range(1, num_layers):
        is_same_N = labels_NL[:, layer] == labels_NL[:, layer - 1]
        streak_N = np.where(is_same_N, streak_N + 1, 0)
        used_N = np.where(streak_N >= patience, np.minimum(used_N, layer + 1), used_N)
    return used_N


def early_exit_figures(
    metrics: Sequence[Metric], logits_NLK: NDArray[np.float32], targets_N: NDArray[Any]
) -> dict[str, list[dict[str, float]]]:
    """Return the metrics after each layer, and for each patience with the mean number of layers."""
    num_texts, num_layers, _ = logits_NLK.shape
    by_layer: list[dict[str, float]] = [
        {"layers": layer + 1, **metric_figures(metrics, logits_NLK[:, layer], targets_N)}
        for layer in range(num_layers)
    ]
    by_patience: list[dict[str, float]] = []
    for patience in range(1, num_layers):
        used_N = layers_used(logits_NLK, patience)
        answers_NK = logits_NLK[np.arange(num_texts), used_N - 1]
        by_patience.append(
            {
                "patience": patience,
                "mean_layers": float(used_N.mean()),
                **metric_figures(metrics, answers_NK, targets_N),
            }
        )
    return {"by_layer": by_layer, "by_patience": by_patience}
