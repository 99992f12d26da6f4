"""The heads of the six tasks, and the model with one backbone and any of these heads.

A head maps rows of hidden states to rows of logits, so that a task computes only what it needs:
masked positions for fill-mask, the [CLS] row for classification, all real rows for spans.

Shape legend: B sequences, S positions, H hidden size, E embedding size, V vocabulary,
R rows gathered from hidden states, K outputs, L layers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, TypeAlias

import torch
from torch import Tensor, nn

from albert_serve.bundle.weights import (
    CLASSIFICATION,
    HEAD_NAME,
    TOKENS,
    UNPOOLED_TASKS,
)
from albert_serve.config import AlbertConfig
from albert_serve.errors import ConfigError
from training.model.albert import Albert, Initializer, ModelInputs, activation

# Name of a head: its task's name, or `text-classification/NAME` for a named classifier.
Task: TypeAlias = str
MULTIPLE_CHOICE: Final[Task] = "multiple-choice"
# Number of outputs of a task's head, or None if it depends on the vocabulary or the labels.
_NUM_OUTPUTS: Final[dict[Task, int | None]] = {
    "fill-mask": None,
    "sentence-order": 2,
    "text-classification": None,
    "question-answering": 2,
    MULTIPLE_CHOICE: 1,
    "token-classification": None,
}
# Heads whose weights are all named `classifier`, so a model can have only one of them.
NAMED_CLASSIFIER: Final[tuple[Task, ...]] = (
    "text-classification",
    MULTIPLE_CHOICE,
    "token-classification",
)


class FillMaskHead(nn.Module):
    """Linear map, activation, norm and the tied word embeddings, for vocabulary logits."""

    def __init__(self, config: AlbertConfig, word: nn.Embedding) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.embedding_size)
        self.activation = activation(config)
        self.norm = nn.LayerNorm(config.embedding_size, eps=config.layer_norm_eps)
        self.decoder = nn.Linear(config.embedding_size, config.vocab_size)
        self.decoder.weight = word.weight

    def forward(self, rows_RH: Tensor) -> Tensor:
        """Return the logits (R, V) of rows (R, H)."""
        logits_RV: Tensor = self.decoder(self.norm(self.activation(self.dense(rows_RH))))
        return logits_RV


class _Pooler(nn.Module):
    """Linear map and tanh of the [CLS] row."""

    def __init__(self, config: AlbertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, rows_RH: Tensor) -> Tensor:
        """Return the pooled rows (R, H) of [CLS] rows (R, H)."""
        return torch.tanh(self.dense(rows_RH))


class PooledHead(nn.Module):
    """Pooler, dropout and linear map, for sentence order, classification and multiple choice.

    Sentence order has no dropout, as in the original code (`get_sentence_order_output`).
    """

    def __init__(self, pooler: _Pooler, hidden_size: int, num_outputs: int, dropout: float) -> None:
        super().__init__()
        self.pooler = pooler
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(hidden_size, num_outputs)

    def forward(self, rows_RH: Tensor) -> Tensor:
        """Return the logits (R, K) of [CLS] rows (R, H)."""
        logits_RK: Tensor = self.output(self.dropout(self.pooler(rows_RH)))
        return logits_RK


class _TokenHead(nn.Module):
    """Dropout and linear map, for every token's label, or for an answer's start and end.

    Question answering has no dropout, as in the original code.
    """

    def __init__(self, hidden_size: int, num_outputs: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(hidden_size, num_outputs)

    def forward(self, rows_RH: Tensor) -> Tensor:
        """Return the logits (R, K) of rows (R, H)."""
        logits_RK: Tensor = self.output(self.dropout(rows_RH))
        return logits_RK


class AlbertForTasks(nn.Module):
    """One backbone with a head for each task: `model.heads[task](rows)`.

    Args:
        tasks: number of outputs of each task's head, such as `head_sizes` returns.
    """

    def __init__(self, config: AlbertConfig, tasks: Mapping[Task, int]) -> None:
        super().__init__()
        _check_tasks(config, tasks)
        self.config = config
        self.tasks = dict(tasks)
        self.albert = Albert(config)
        pooled = [task for task in tasks if task not in UNPOOLED_TASKS]
        self.pooler = _Pooler(config) if pooled else None
        self.heads = nn.ModuleDict({task: self._head(task, tasks[task]) for task in tasks})
        initialize = Initializer(config.initializer_range)
        for head in self.heads.values():
            head.apply(initialize)

    def _head(self, task: Task, num_outputs: int) -> nn.Module:
        if task == "fill-mask":
            return FillMaskHead(self.config, self.albert.embeddings.word)
        if task == "question-answering":
            return _TokenHead(self.config.hidden_size, num_outputs)
        if task == TOKENS:
            dropout = self.config.classifier_dropout
            return _TokenHead(self.config.hidden_size, num_outputs, dropout)
        assert self.pooler is not None
        dropout = 0.0 if task == "sentence-order" else self.config.classifier_dropout
        return PooledHead(self.pooler, self.config.hidden_size, num_outputs, dropout)

    def forward(self, batch: ModelInputs, read: Tensor | None = None) -> Tensor:
        """Return the hidden states (B, S, H), or (R, H) at the gathered positions `read`."""
        hidden_BSH: Tensor = self.albert(batch, read)
        return hidden_BSH

    def logits(self, task: Task, rows_RH: Tensor) -> Tensor:
        """Return the logits (R, K) of gathered rows (R, H)."""
        logits_RK: Tensor = self.heads[task](rows_RH)
        return logits_RK


def head_sizes(config: AlbertConfig, tasks: tuple[Task, ...]) -> dict[Task, int]:
    """Return the number of outputs of each task's head, or two if it depends on the labels."""
    return {
        task: config.vocab_size if task == "fill-mask" else _NUM_OUTPUTS[task] or 2
        for task in tasks
    }


def is_named(head: Task) -> bool:
    """Return whether a head is a text classifier with a valid name, not the default one."""
    return re.fullmatch(f"{CLASSIFICATION}/{HEAD_NAME}", head) is not None


def is_classifier(head: Task) -> bool:
    """Return whether a head is the default text classifier or a named one."""
    return head == CLASSIFICATION or is_named(head)


def has_labels(head: Task) -> bool:
    """Return whether the outputs of a head are labels with names."""
    return head == TOKENS or is_classifier(head)


def _check_tasks(config: AlbertConfig, tasks: Mapping[Task, int]) -> None:
    same_name = [task for task in NAMED_CLASSIFIER if task in tasks]
    if len(same_name) > 1:
        raise ConfigError(
            f"{' and '.join(same_name)} have the same name for their weights, `classifier`. Choose "
            "one of them."
        )
    for task, num_outputs in tasks.items():
        if is_named(task) and CLASSIFICATION not in tasks:
            raise ConfigError(f"{task} requires a default classifier. Add {CLASSIFICATION}.")
        if task not in _NUM_OUTPUTS and not is_named(task):
            raise ConfigError(f"{task!r} is not a task. Choose one of {', '.join(_NUM_OUTPUTS)}.")
        required = config.vocab_size if task == "fill-mask" else _NUM_OUTPUTS.get(task)
        if num_outputs < 1 or (required and num_outputs != required):
            raise ConfigError(
                f"{task} has {num_outputs} outputs. It must have {required or 'at least 1'}."
            )
