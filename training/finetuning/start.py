"""The model that a finetuning run starts from."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from albert_serve.bundle.weights import QuestionHead, question_head_of
from albert_serve.config import AlbertConfig
from training.model.checkpoint import (
    has_stored_exits,
    load_checkpoint,
    read_config,
    read_shapes,
    read_tasks,
)
from training.model.heads import AlbertForTasks, Task, head_sizes
from training.model.resizing import cut_positions

# Both are named `classifier`, so that a checkpoint has one of them.
_ONE_CLASSIFIER: Final[tuple[Task, Task]] = ("text-classification", "multiple-choice")


def load_start(
    folder: Path,
    config: AlbertConfig,
    tasks: tuple[Task, ...],
    labels: Mapping[str, Any],
    *,
    has_exits: bool = False,
    question_head: QuestionHead = "independent",
) -> AlbertForTasks:
    """Load a checkpoint with the heads of the tasks beside its own, and report a replaced one.

    A head that the checkpoint lacks, or has with another number of outputs, is new.

    Args:
        config: its sizes, perhaps with fewer positions and other dropout.
        labels: keys of `config.json` that name the labels of text classification, if it is trained.
        has_exits: whether it is trained with classifiers after each layer.
        question_head: the head of question answering, if it is trained.

    Raises:
        ConfigError, CheckpointError: as `load_checkpoint`.
    """
    heads = _without_replaced(read_tasks(folder), tasks)
    sizes = {
        **heads,
        **head_sizes(config, tasks, len(labels.get("id2label", ())), question_head),
    }
    if "text-classification" in heads and labels:
        notice = _describe_change(folder, heads["text-classification"], labels)
        if notice:
            print(notice)
    stored_head = question_head_of("question-answering", heads.get("question-answering", 0))
    if "question-answering" in tasks and stored_head not in (None, question_head):
        print(
            f"the checkpoint's {stored_head} head of questions is replaced by one that is "
            f"{question_head}"
        )
    is_trained = "text-classification" in tasks
    if is_trained and not has_exits and has_stored_exits(read_shapes(folder), heads):
        print("the checkpoint's classifiers after each layer are left out (--adaptive-depth)")
    model = load_checkpoint(folder, sizes, has_exits=has_exits if is_trained else None)
    if config.max_positions != model.config.max_positions:
        model = cut_positions(model, config.max_positions)
    return model if config == model.config else _with_config(model, config)


def _without_replaced(heads: Mapping[Task, int], tasks: Collection[Task]) -> dict[Task, int]:
    """Return the checkpoint's heads without one whose place in the file a new head takes."""
    kept = dict(heads)
    for task, other in (_ONE_CLASSIFIER, _ONE_CLASSIFIER[::-1]):
        if task in tasks and other in kept:
            del kept[other]
            print(f"the checkpoint's head of {other} is replaced by one of {task}")
    return kept


def changed_config(
    config: AlbertConfig,
    *,
    max_positions: int | None,
    dropout: float | None,
    classifier_dropout: float | None,
) -> AlbertConfig:
    """Return the config with the values that are not None."""
    values: dict[str, Any] = {
        "max_positions": max_positions,
        "hidden_dropout": dropout,
        "attention_dropout": dropout,
        "classifier_dropout": classifier_dropout,
    }
    return replace(config, **{name: value for name, value in values.items() if value is not None})


def _with_config(model: AlbertForTasks, config: AlbertConfig) -> AlbertForTasks:
    """Return the model with another config of the same sizes."""
    changed = AlbertForTasks(config, model.tasks, has_exits=model.exits is not None)
    changed.load_state_dict(model.state_dict())
    return changed


def _describe_change(folder: Path, num_outputs: int, labels: Mapping[str, Any]) -> str | None:
    """Describe how the labels differ from those of the checkpoint's classifier; None if not."""
    names = list(labels["id2label"].values())
    before = [str(name) for name in (read_config(folder).get("id2label") or {}).values()]
    is_named = len(before) == num_outputs
    described = f"{num_outputs} outputs" + (f" ({', '.join(before)})" if is_named else "")
    if num_outputs != len(names):
        return (
            f"the checkpoint's classifier has {described}; "
            f"a new one is trained, of {len(names)} ({', '.join(names)})"
        )
    if not is_named or before == names or before == [f"LABEL_{i}" for i in range(num_outputs)]:
        return None
    shown = f"{', '.join(before)}, for {', '.join(names)}"
    return f"the classifier goes on from the checkpoint's of {shown}"
