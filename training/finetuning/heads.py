"""The classifiers of a finetuning run, and their places in the model."""

from __future__ import annotations

from typing import NamedTuple

from albert_serve.bundle.manifest import DEFAULT_HEAD
from albert_serve.bundle.weights import CLASSIFICATION, further_head
from training.errors import RunError
from training.finetuning.config import ClassifierConfig, FinetuneConfig
from training.finetuning.start import Start
from training.model.heads import Task
from training.model.labels import default_name


class ClassifierHead(NamedTuple):
    """A classifier of a run: its head in the model, and the configuration of its data."""

    task: Task
    config: ClassifierConfig


def trained_heads(config: FinetuneConfig, start: Start) -> list[ClassifierHead]:
    """Return the classifiers that are trained, in the order of --weights.

    Data before `--head` is the default classifier's, which `transformers` reads. Without, and in a
    checkpoint that has none, the default is the head of that name, or else the first.

    Raises:
        RunError: two classifiers have one name, or options do not go together.
    """
    heads = config.heads
    trained = [ClassifierHead(CLASSIFICATION, config)] if config.text_classification else []
    default = default_name(start.hf) or DEFAULT_HEAD
    if heads and not trained and CLASSIFICATION not in start.heads:
        names = [head.head for head in heads if head.head is not None]
        default = DEFAULT_HEAD if DEFAULT_HEAD in names else names[0]
    for head in heads:
        assert head.head is not None
        if head.head == DEFAULT_HEAD != default:
            raise RunError(f"--head {DEFAULT_HEAD}: the default classifier is named {default}")
        task = CLASSIFICATION if head.head == default else further_head(head.head)
        if task == CLASSIFICATION and config.text_classification:
            raise RunError(
                f"--head {head.head} names the default classifier, whose data stands before --head "
                "already; give another name"
            )
        trained.append(ClassifierHead(task, head))
    return trained
