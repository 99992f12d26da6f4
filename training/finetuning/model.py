"""The model of a finetuning run: the checkpoint with the heads of the run's tasks."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

import torch

from albert_serve.bundle.weights import CLASSIFICATION, UNPOOLED_TASKS
from albert_serve.config import AlbertConfig
from albert_serve.errors import listed
from training.data.examples import check_length
from training.data.labelled.cells import label_indices, label_key
from training.finetuning.config import FinetuneConfig
from training.model.checkpoint import CheckpointError, load_checkpoint, read_config, read_tasks
from training.model.heads import (
    NAMED_CLASSIFIER,
    AlbertForTasks,
    Task,
    has_labels,
    head_sizes,
    is_named,
)
from training.model.labels import default_name, head_record, labels_config
from training.tasks.base import TrainingTask
from training.tasks.classification.fitted_head import HeadFit
from training.tasks.classification.loss import Classification

_ORDER: Final = "sentence-order"
_POSITIONS: Final = "albert.embeddings.position.weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """The checkpoint that a run starts from, with the sizes that the run gives its model.

    Attributes:
        hf: content of `config.json`.
        heads: number of outputs of each head.
        architecture: sizes of the run's model, which may have fewer positions and other dropout.
    """

    folder: Path
    hf: Mapping[str, Any]
    heads: Mapping[Task, int]
    architecture: AlbertConfig

    @classmethod
    def open(cls, folder: Path, config: FinetuneConfig) -> Self:
        """Read a checkpoint in the standard form, except its weights."""
        hf = read_config(folder)
        architecture = _architecture(config, hf)
        return cls(folder=folder, hf=hf, heads=read_tasks(folder), architecture=architecture)


def extra_config(
    start: Start, heads: Collection[Task], tasks: Sequence[TrainingTask]
) -> dict[str, Any]:
    """Return the keys of config.json that name the sentence task, all labels and the default head.

    Classifiers that are not trained keep the checkpoint's labels. The default classifier keeps its
    name, unless the run names it or changes its labels.

    Args:
        heads: heads of the model.
    """
    labels = labels_of(tasks)
    records = {
        head: labels[head] if head in labels else head_record(start.hf, head)
        for head in heads
        if has_labels(head)
    }
    name = default_name(start.hf)
    default = next((task for task in tasks if task.name == CLASSIFICATION), None)
    if isinstance(default, Classification):
        checkpoint_labels = _stored_names(start, CLASSIFICATION)
        has_same_labels = [*map(label_key, checkpoint_labels)] == [*map(label_key, default.names)]
        name = default.head_name or (name if has_same_labels else None)
    sentence_task = {key: start.hf[key] for key in ("albert_sentence_task",) if key in start.hf}
    return {**sentence_task, **labels_config(records, name)}


def labels_of(tasks: Sequence[TrainingTask]) -> dict[Task, Mapping[str, Any]]:
    """Return the keys of `config.json` that name the labels of each head."""
    return {task.name: task.labels for task in tasks if task.labels is not None}


def load_start(
    start: Start,
    tasks: Sequence[Task],
    labels: Mapping[Task, Mapping[str, Any]],
) -> AlbertForTasks:
    """Load a checkpoint, add the heads of the tasks, and report a replaced head.

    A head is new if the checkpoint lacks it, or has it with other labels.

    Args:
        labels: keys of `config.json` that name the labels of each trained classifier.
    """
    config = start.architecture
    heads = _without_replaced(start.heads, tasks)
    sizes = dict(heads)
    orders: dict[Task, list[int]] = {}
    for task in tasks:
        record = labels.get(task)
        if record is None:
            sizes |= head_sizes(config, (task,))
            continue
        sizes[task] = len(record["id2label"])
        if task in heads:
            order = _order(_stored_names(start, task), record)
            if order is not None:
                orders[task] = order
    model = load_checkpoint(start.folder, sizes, new_heads=labels.keys() - orders.keys())
    for task, order in orders.items():
        _reorder(model, task, order)
    return model if config == model.config else with_config(model, config)


def _without_replaced(heads: Mapping[Task, int], tasks: Collection[Task]) -> dict[Task, int]:
    """Return the checkpoint's heads, except heads that a new head replaces in the file."""
    remaining_heads = dict(heads)
    replacing = next((task for task in NAMED_CLASSIFIER if task in tasks), None)
    if replacing is None:
        return remaining_heads
    named_heads = [head for head in heads if is_named(head)]
    if replacing != CLASSIFICATION and named_heads:
        remaining_heads = {head: size for head, size in heads.items() if head not in named_heads}
        print(f"The checkpoint's named classifiers are removed: {', '.join(named_heads)}.")
    for head in NAMED_CLASSIFIER:
        if head != replacing and head in remaining_heads:
            del remaining_heads[head]
            print(f"The checkpoint's {head} head is replaced by a {replacing} head.")
    return remaining_heads


def with_config(model: AlbertForTasks, config: AlbertConfig) -> AlbertForTasks:
    """Return the model with another config, which has the same sizes or fewer positions."""
    if config.max_positions > model.config.max_positions:
        raise CheckpointError(
            f"{config.max_positions} positions are more than the {model.config.max_positions} of "
            "the model."
        )
    changed, weights = AlbertForTasks(config, model.tasks), model.state_dict()
    weights[_POSITIONS] = weights[_POSITIONS][: config.max_positions]
    changed.load_state_dict(weights)
    return changed


def _stored_names(start: Start, head: Task) -> list[str]:
    names = head_record(start.hf, head).get("id2label") or {}
    return [str(names.get(str(i), f"LABEL_{i}")) for i in range(start.heads.get(head, 0))]


def _reorder(model: AlbertForTasks, task: Task, order: Sequence[int]) -> None:
    """Reorder the outputs of a classifier."""
    for name, parameter in model.named_parameters():
        if name.startswith(f"heads.{task}.output.") and list(order) != sorted(order):
            with torch.no_grad():
                parameter.copy_(parameter[list(order)])


def new_classifiers(start: Start, labels: Mapping[Task, Mapping[str, Any]]) -> list[Task]:
    """Return the classifiers whose labels differ from the checkpoint's, and report a change.

    Args:
        labels: keys of `config.json` that name the labels of each trained classifier.
    """
    new = []
    for head, record in labels.items():
        checkpoint_labels = _stored_names(start, head)
        if _order(checkpoint_labels, record) is None:
            new.append(head)
            if head in start.heads:
                names = listed(_names(record))
                replaced_names = listed(checkpoint_labels)
                print(f"A new classifier of {names} replaces the classifier of {replaced_names}.")
    return new


def head_fit_of(
    model: AlbertForTasks,
    start: Start,
    tasks: Sequence[TrainingTask],
    *,
    fits_all: bool,
    seed: int,
    contrast_rate: float | None,
) -> HeadFit | None:
    """Return the fit of the new classifiers or of all classifiers, or None if there are none.

    A sentence-order head that prevents whitening is removed.

    Args:
        fits_all: whether all classifiers are fitted, because no step trains them.
        contrast_rate: learning rate of the contrast, or None without a contrast.
    """
    new = new_classifiers(start, labels_of(tasks))
    classifiers = [task for task in tasks if isinstance(task, Classification)]
    data = {task.name: task for task in classifiers if task.name in new or fits_all}
    if not data:
        return None
    readers = model.tasks.keys() - UNPOOLED_TASKS - data.keys()
    replaces_pooler = readers <= {_ORDER} - {head for task in tasks for head in task.heads}
    if replaces_pooler and readers:
        print(f"The checkpoint's {_ORDER} head is removed. Use --pretraining to continue it.")
        del model.heads[_ORDER], model.tasks[_ORDER]
    return HeadFit(
        model=model,
        data=data,
        replaces_pooler=replaces_pooler,
        seed=seed,
        contrast_rate=contrast_rate,
    )


def _order(checkpoint_labels: Sequence[str], record: Mapping[str, Any]) -> list[int] | None:
    """Return the checkpoint's output for each label, or None if its labels have other meanings.

    A number or a score may mean something else in other data.
    """
    names = _names(record)
    indices = label_indices(checkpoint_labels, names)
    are_numbers = all(re.fullmatch(r"(LABEL_)?[-\d.]+", name) for name in names)
    is_scored = record.get("problem_type") == "regression"
    is_same = len(checkpoint_labels) == len(names) == len(set(indices.values()))
    return None if are_numbers or is_scored or not is_same else [indices[name] for name in names]


def _names(record: Mapping[str, Any]) -> list[str]:
    return list(record["id2label"].values())


def _architecture(config: FinetuneConfig, hf: Mapping[str, Any]) -> AlbertConfig:
    changes: dict[str, Any] = {
        "max_positions": config.max_positions,
        "hidden_dropout": config.dropout,
        "attention_dropout": config.dropout,
        "classifier_dropout": config.classifier_dropout,
    }
    overrides = {name: value for name, value in changes.items() if value is not None}
    sizes = replace(AlbertConfig.from_hf(hf), **overrides)
    # Without --length, windows of questions have 384 tokens, or as many as the model has positions.
    has_default = config.has_questions_alone and config.question_length != config.length
    if not has_default:
        check_length("--length", config.length, sizes.max_positions)
    if config.order_length is not None:
        check_length("--order-length", config.order_length, sizes.max_positions)
    return sizes
