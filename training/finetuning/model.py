"""The model of a finetuning run: the checkpoint's, with the heads of the run's tasks."""

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
from training.data.examples import MIN_LENGTH
from training.data.labelled.cells import label_indices, label_key
from training.errors import RunError
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
        hf: content of its `config.json`.
        heads: the outputs of each of its heads.
        architecture: its sizes, perhaps with fewer layers or positions, and other dropout.
    """

    folder: Path
    hf: Mapping[str, Any]
    heads: Mapping[Task, int]
    architecture: AlbertConfig

    @classmethod
    def open(cls, folder: Path, config: FinetuneConfig) -> Self:
        """Read a checkpoint in the standard form, but its weights."""
        hf = read_config(folder)
        architecture = _architecture(config, hf)
        return cls(folder=folder, hf=hf, heads=read_tasks(folder), architecture=architecture)


def extra_config(
    start: Start, heads: Collection[Task], tasks: Sequence[TrainingTask]
) -> dict[str, Any]:
    """Return the keys of config.json that name the sentence task, all labels and the default head.

    Labels of classifiers that are not trained are the checkpoint's, as is the default's name unless
    another is given, or its labels are others.

    Args:
        heads: of the model.
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
        before = _stored_names(start, CLASSIFICATION)
        has_same_labels = [*map(label_key, before)] == [*map(label_key, default.names)]
        name = default.head_name or (name if has_same_labels else None)
    sentence_task = {key: start.hf[key] for key in ("albert_sentence_task",) if key in start.hf}
    return {**sentence_task, **labels_config(records, name)}


def labels_of(tasks: Sequence[TrainingTask]) -> dict[Task, Mapping[str, Any]]:
    """Return the keys of `config.json` that name the labels of each head that has some."""
    return {task.name: task.labels for task in tasks if task.labels is not None}


def load_start(
    start: Start,
    tasks: Sequence[Task],
    labels: Mapping[Task, Mapping[str, Any]],
) -> AlbertForTasks:
    """Load a checkpoint, add the heads of the tasks, and report a replaced head.

    A head that the checkpoint lacks, or a classifier that it has with other labels, is new.

    Args:
        labels: of each classifier that is trained, keys of `config.json` that name its labels.
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
    """Return the checkpoint's heads without those whose place in the file a new head takes."""
    kept = dict(heads)
    replacing = next((task for task in NAMED_CLASSIFIER if task in tasks), None)
    if replacing is None:
        return kept
    if replacing != CLASSIFICATION and (further := [head for head in heads if is_named(head)]):
        kept = {head: size for head, size in kept.items() if head not in further}
        print(f"the checkpoint's further classifiers are left out: {', '.join(further)}")
    for other in NAMED_CLASSIFIER:
        if other != replacing and other in kept:
            del kept[other]
            print(f"the checkpoint's head of {other} is replaced by one of {replacing}")
    return kept


def with_config(model: AlbertForTasks, config: AlbertConfig) -> AlbertForTasks:
    """Return the model with another config of the same sizes, or of fewer positions."""
    if config.max_positions > model.config.max_positions:
        raise CheckpointError(
            f"{config.max_positions} positions cannot be cut from the model's "
            f"{model.config.max_positions}"
        )
    changed, weights = AlbertForTasks(config, model.tasks), model.state_dict()
    weights[_POSITIONS] = weights[_POSITIONS][: config.max_positions]
    changed.load_state_dict(weights)
    return changed


def _stored_names(start: Start, head: Task) -> list[str]:
    names = head_record(start.hf, head).get("id2label") or {}
    return [str(names.get(str(i), f"LABEL_{i}")) for i in range(start.heads.get(head, 0))]


def _reorder(model: AlbertForTasks, task: Task, order: Sequence[int]) -> None:
    """Put the outputs of a classifier into another order."""
    for name, parameter in model.named_parameters():
        if name.startswith(f"heads.{task}.output.") and list(order) != sorted(order):
            with torch.no_grad():
                parameter.copy_(parameter[list(order)])


def new_classifiers(start: Start, labels: Mapping[Task, Mapping[str, Any]]) -> list[Task]:
    """Return the classifiers whose labels differ from the checkpoint's, and report a change.

    Args:
        labels: the keys of each classifier that is trained.
    """
    new = []
    for head, record in labels.items():
        before = _stored_names(start, head)
        if _order(before, record) is None:
            new.append(head)
            if head in start.heads:
                names = listed(_names(record))
                print(f"a new classifier of {names} replaces that of {listed(before)}")
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
    """Return the fit of the new classifiers, or of all; None without any.

    A head of sentence order that hinders whitening is left out.

    Args:
        fits_all: whether no step trains the classifiers.
        contrast_rate: as in `HeadFit`.
    """
    new = new_classifiers(start, labels_of(tasks))
    classifiers = [task for task in tasks if isinstance(task, Classification)]
    data = {task.name: task for task in classifiers if task.name in new or fits_all}
    if not data:
        return None
    readers = model.tasks.keys() - UNPOOLED_TASKS - data.keys()
    replaces_pooler = readers <= {_ORDER} - {head for task in tasks for head in task.heads}
    if replaces_pooler and readers:
        print(f"the checkpoint's head of {_ORDER} is left out (--pretraining trains it on)")
        del model.heads[_ORDER], model.tasks[_ORDER]
    return HeadFit(
        model=model,
        data=data,
        replaces_pooler=replaces_pooler,
        seed=seed,
        contrast_rate=contrast_rate,
    )


def _order(before: Sequence[str], record: Mapping[str, Any]) -> list[int] | None:
    """Return the output in a checkpoint of each label; None if its labels had other meanings.

    Numbers and scores may always have.
    """
    names = _names(record)
    indices = label_indices(before, names)
    are_numbers = all(re.fullmatch(r"(LABEL_)?[-\d.]+", name) for name in names)
    is_scored = record.get("problem_type") == "regression"
    is_same = len(before) == len(names) == len(set(indices.values()))
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
    given = {name: value for name, value in changes.items() if value is not None}
    sizes = replace(AlbertConfig.from_hf(hf), **given)
    # Without --length, windows of questions have 384 tokens, or as many as the model has positions.
    has_default = config.has_questions_alone and config.question_length != config.length
    if not has_default and not MIN_LENGTH <= config.length <= sizes.max_positions:
        raise RunError(
            f"--length {config.length}: a sequence has from {MIN_LENGTH} tokens to the model's "
            f"{sizes.max_positions} positions"
        )
    if not MIN_LENGTH <= (config.order_length or MIN_LENGTH) <= sizes.max_positions:
        raise RunError(
            f"--order-length {config.order_length}: a pair has from {MIN_LENGTH} tokens to the "
            f"model's {sizes.max_positions} positions"
        )
    return sizes
