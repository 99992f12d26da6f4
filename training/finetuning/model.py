"""The model of a finetuning run: its classifiers, and the checkpoint that it starts from."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from albert_serve.bundle.manifest import DEFAULT_HEAD
from albert_serve.bundle.weights import (
    CLASSIFICATION,
    further_head,
)
from albert_serve.config import AlbertConfig
from albert_serve.names import listed
from training.finetuning.config import ClassifierConfig
from training.finetuning.settings import FinetuneSettings
from training.loop.progress import RunError
from training.model.checkpoint import load_checkpoint, read_config, read_tasks
from training.model.heads import AlbertForTasks, Task, head_sizes, is_classifier, is_further
from training.model.labels import default_name, head_record, labels_config
from training.model.resizing import cut_positions

# Both are named `classifier`, so that a checkpoint has one of them.
_ONE_CLASSIFIER: Final[tuple[Task, Task]] = ("text-classification", "multiple-choice")


class ClassifierHead(NamedTuple):
    """A classifier of a run: its head in the model, and the configuration of its data."""

    task: Task
    config: ClassifierConfig


def place(
    settings: FinetuneSettings, stored: Mapping[Task, int], hf: Mapping[str, Any]
) -> list[ClassifierHead]:
    """Return the classifiers that are trained, in the order of --weights.

    Data before `--head` is the default classifier's, which `transformers` reads. Without, and in a
    checkpoint that has none, the default is the head of that name, or else the first.

    Args:
        stored: heads of the checkpoint.
        hf: its `config.json`.

    Raises:
        RunError: two classifiers have one name, or options do not go together.
    """
    heads = settings.heads
    placed = [ClassifierHead(CLASSIFICATION, settings)] if settings.text_classification else []
    default = default_name(hf) or DEFAULT_HEAD
    if heads and not placed and CLASSIFICATION not in stored:
        names = [head.head for head in heads if head.head is not None]
        default = DEFAULT_HEAD if DEFAULT_HEAD in names else names[0]
    for head in heads:
        assert head.head is not None
        if head.head == DEFAULT_HEAD != default:
            raise RunError(f"--head {DEFAULT_HEAD}: the default classifier is named {default}")
        task = CLASSIFICATION if head.head == default else further_head(head.head)
        if task == CLASSIFICATION and settings.text_classification:
            raise RunError(
                f"--head {head.head} names the default classifier, whose data stands before --head "
                "already; give another name"
            )
        placed.append(ClassifierHead(task, head))
    return placed


def label_config(
    hf: Mapping[str, Any],
    heads: Collection[Task],
    placed: Sequence[ClassifierHead],
    labels: Mapping[Task, Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the keys of config.json that name the labels of all classifiers, and the default.

    Labels of classifiers that are not trained are the checkpoint's, as is the default's name unless
    another is given, or its labels are others.

    Args:
        heads: of the model.
        labels: the keys of each classifier that is trained.
    """
    records = {
        head: labels[head] if head in labels else head_record(hf, head)
        for head in heads
        if is_classifier(head)
    }
    name = default_name(hf)
    for each in placed:
        if each.task == CLASSIFICATION:
            has_same_labels = hf.get("id2label") == labels[each.task]["id2label"]
            name = each.config.head or (name if has_same_labels else None)
    return labels_config(records, name)


def load_start(
    folder: Path,
    config: AlbertConfig,
    tasks: tuple[Task, ...],
    labels: Mapping[Task, Mapping[str, Any]],
) -> AlbertForTasks:
    """Load a checkpoint with the heads of the tasks beside its own, and report a replaced one.

    A head that the checkpoint lacks, or a classifier that it has with other labels, is new.

    Args:
        config: its sizes, perhaps with fewer positions and other dropout.
        labels: of each classifier that is trained, keys of `config.json` that name its labels.

    Raises:
        ConfigError, CheckpointError: as `load_checkpoint`.
    """
    heads = _without_replaced(read_tasks(folder), tasks)
    sizes = dict(heads)
    orders: dict[Task, list[int]] = {}
    for task in tasks:
        record = labels.get(task)
        if record is None:
            sizes |= head_sizes(config, (task,))
        else:
            sizes[task] = len(record["id2label"])
        if record is not None and task in heads:
            before, names = _stored_names(folder, task, heads[task]), _names(record)
            if set(before) == set(names):
                orders[task] = [before.index(name) for name in names]
    model = load_checkpoint(folder, sizes, new_heads=labels.keys() - orders.keys())
    for task, order in orders.items():
        _reorder(model, task, order)
    if config.max_positions != model.config.max_positions:
        model = cut_positions(model, config.max_positions)
    return model if config == model.config else _with_config(model, config)


def _without_replaced(heads: Mapping[Task, int], tasks: Collection[Task]) -> dict[Task, int]:
    """Return the checkpoint's heads without those whose place in the file a new head takes."""
    kept = dict(heads)
    if "multiple-choice" in tasks and (further := [head for head in heads if is_further(head)]):
        kept = {head: size for head, size in kept.items() if head not in further}
        print(f"the checkpoint's further classifiers are left out: {', '.join(further)}")
    for task, other in (_ONE_CLASSIFIER, _ONE_CLASSIFIER[::-1]):
        if task in tasks and other in kept:
            del kept[other]
            print(f"the checkpoint's head of {other} is replaced by one of {task}")
    return kept


def _with_config(model: AlbertForTasks, config: AlbertConfig) -> AlbertForTasks:
    """Return the model with another config of the same sizes."""
    changed = AlbertForTasks(config, model.tasks)
    changed.load_state_dict(model.state_dict())
    return changed


def _stored_names(folder: Path, head: Task, num_outputs: int) -> list[str]:
    names = head_record(read_config(folder), head).get("id2label") or {}
    return [str(names.get(str(index), f"LABEL_{index}")) for index in range(num_outputs)]


def _reorder(model: AlbertForTasks, task: Task, order: Sequence[int]) -> None:
    """Put the outputs of a classifier into another order."""
    for name, parameter in model.named_parameters():
        if name.startswith(f"heads.{task}.output.") and list(order) != sorted(order):
            with torch.no_grad():
                parameter.copy_(parameter[list(order)])


def new_classifiers(folder: Path, labels: Mapping[Task, Mapping[str, Any]]) -> list[Task]:
    """Return the classifiers whose labels are not those of the checkpoint's, and report a change.

    Args:
        labels: the keys of each classifier that is trained.
    """
    stored = read_tasks(folder)
    new = []
    for head, record in labels.items():
        before, names = _stored_names(folder, head, stored.get(head, 0)), _names(record)
        if set(before) != set(names):
            new.append(head)
            if head in stored:
                print(f"a new classifier of {listed(names)} replaces that of {listed(before)}")
    return new


def _names(record: Mapping[str, Any]) -> list[str]:
    return list(record["id2label"].values())
