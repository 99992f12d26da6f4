"""Evaluation of text classification and of regression.

Shape legend: N texts, K labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from sklearn.metrics import precision_recall_fscore_support
from torch import Tensor
from torch.nn import functional as F

from albert_serve.tasks.base import EncoderInput
from albert_serve.tokenizer import AlbertTokenizer
from training.data.feeds import LabelledExample, labelled_examples
from training.data.labelled.texts import LabelledText
from training.evaluation.metrics import metric_figures
from training.evaluation.predictions import Item
from training.evaluation.torch_engine import predict_in_torch
from training.glue.tasks import Metric
from training.losses import Tally, score
from training.model.heads import AlbertForTasks

# Of the figures' names.
PREFIX: Final = "text_classification"


def evaluate_classification(
    model: AlbertForTasks,
    tokenizer: AlbertTokenizer,
    texts: Sequence[LabelledText],
    names: Sequence[str],
    *,
    truncation: bool = False,
    metrics: Sequence[Metric] = (),
    outputs: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Evaluate text classification: loss, accuracy, macro-F1, and the figures of each class.

    Args:
        names: of the labels.
        truncation: whether long texts are cut to the model's positions.
        metrics: further ones.
        outputs: the model's output of each label; None if they are in the same order.

    Raises:
        CorpusError: texts are longer than the model has positions, and `truncation` is off.
    """
    examples, num_cut = _examples(model, tokenizer, texts, truncation=truncation)
    logits_NK = _logits(model, examples)
    if outputs is not None:
        logits_NK = logits_NK[:, list(outputs)]
    labels_N = torch.tensor([example.label for example in examples])
    total = Tally()
    total.add(score(logits_NK, labels_N))
    precisions, recalls, f1s, counts = precision_recall_fscore_support(
        labels_N.numpy(),
        logits_NK.argmax(-1).numpy(),
        labels=range(len(names)),
        zero_division=0.0,
    )
    is_present = counts > 0
    further = metric_figures(metrics, logits_NK.numpy(), labels_N.numpy())
    return {
        f"{PREFIX}_accuracy": total.accuracy,
        f"{PREFIX}_macro_f1": float(f1s[is_present].mean()),
        **{f"{PREFIX}_{metric}": value for metric, value in further.items()},
        f"{PREFIX}_loss": total.loss,
        f"{PREFIX}_texts": total.count,
        f"{PREFIX}_truncated": num_cut,
        f"{PREFIX}_classes": {
            name: {
                "precision": float(precisions[index]),
                "recall": float(recalls[index]),
                "f1": float(f1s[index]),
                "texts": int(counts[index]),
            }
            for index, name in enumerate(names)
        },
    }


def evaluate_regression(
    model: AlbertForTasks,
    tokenizer: AlbertTokenizer,
    texts: Sequence[LabelledText],
    *,
    truncation: bool = False,
) -> dict[str, Any]:
    """Evaluate a regression: Pearson's and Spearman's correlation, and the mean squared error.

    Raises:
        CorpusError: as `evaluate_classification`.
    """
    examples, num_cut = _examples(model, tokenizer, texts, truncation=truncation)
    logits_N1 = _logits(model, examples)
    scores_N = torch.tensor([float(example.label) for example in examples])
    figures = metric_figures(("pearson", "spearman"), logits_N1.numpy(), scores_N.numpy())
    return {
        **{f"{PREFIX}_{metric}": value for metric, value in figures.items()},
        f"{PREFIX}_loss": float(F.mse_loss(logits_N1[:, 0], scores_N)),
        f"{PREFIX}_texts": len(examples),
        f"{PREFIX}_truncated": num_cut,
    }


def _examples(
    model: AlbertForTasks,
    tokenizer: AlbertTokenizer,
    texts: Sequence[LabelledText],
    *,
    truncation: bool,
) -> tuple[list[LabelledExample], int]:
    length = model.config.max_positions
    return labelled_examples(texts, tokenizer, length=length, truncation=truncation)


def _logits(model: AlbertForTasks, examples: Sequence[LabelledExample]) -> Tensor:
    """Return the logits (N, K) of the examples."""
    items = [
        Item(
            inputs=[
                EncoderInput(
                    ids=example.ids, types=example.types, task="text-classification", rows=[0]
                )
            ],
            read=lambda logits: logits[0].tolist(),
        )
        for example in examples
    ]
    return torch.tensor(predict_in_torch(model, items, "texts"))
