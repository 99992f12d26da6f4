"""The classifiers of a finetuning run: the default one, and further ones beside it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from albert_serve.bundle.manifest import DEFAULT_HEAD
from albert_serve.bundle.weights import CLASSIFICATION, further_head
from training.finetuning.config import ClassifierConfig
from training.finetuning.settings import OF_TEXTS, FinetuneSettings
from training.loop.progress import RunError
from training.model.heads import Task, is_classifier
from training.model.labels import default_name, head_record, labels_config
from training.run.flags import flag_name


class Placed(NamedTuple):
    """A classifier of a run: its head in the model, and the configuration of its data."""

    task: Task
    config: ClassifierConfig


def place(
    settings: FinetuneSettings, stored: Mapping[Task, int], hf: Mapping[str, Any]
) -> list[Placed]:
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
    _check_has_data(settings)
    placed = [Placed(CLASSIFICATION, settings)] if settings.text_classification else []
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
        placed.append(Placed(task, head))
    if settings.adaptive_depth and CLASSIFICATION not in [each.task for each in placed]:
        raise RunError(
            "--adaptive-depth is of the default text classifier; give its --text-classification"
        )
    return placed


def _check_has_data(settings: FinetuneSettings) -> None:
    """Check that options of the default classifier's labels and columns go with data of its own.

    Raises:
        RunError: they do not.
    """
    given = [name for name in OF_TEXTS if getattr(settings, name) not in (None, ())]
    if given and not (settings.text_classification or settings.multiple_choice):
        shown = ", ".join(map(flag_name, given))
        where = "; a further classifier's options stand after its --head" if settings.heads else ""
        raise RunError(f"{shown}: there are no texts of the default classifier{where}")


def label_config(
    hf: Mapping[str, Any],
    heads: Collection[Task],
    placed: Sequence[Placed],
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
