"""Held-out texts of a checkpoint's classifiers, and their metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from albert_serve.bundle.manifest import ProblemType
from albert_serve.bundle.weights import CLASSIFICATION
from albert_serve.errors import listed
from albert_serve.tasks.base import Runner
from albert_serve.tokenizer import AlbertTokenizer
from training.data.labelled.cells import label_indices, label_key
from training.data.labelled.folders import labelled_files
from training.errors import EvaluationError
from training.glue.files import dev_files
from training.glue.tasks import TASKS, GlueTask
from training.model.heads import Task
from training.model.labels import find_head
from training.options.labelled import LabelledTexts
from training.tasks.classification.files import LabelledText, read_splits, read_task
from training.tasks.classification.metrics import PREFIX, TextPredictions, classify
from training.tasks.metrics import COMBINED, mean_metric

# The user's own files form one split.
_ONLY_SPLIT: Final = "data"


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutTexts:
    """Held-out texts of a classifier.

    Attributes:
        head: head of the model.
        names: names of the classifier's labels, in the order of its outputs.
        task: GLUE task, or None for the user's own files.
        are_numbered: whether the files contain the labels' numbers instead of their names.
    """

    head: Task
    names: Sequence[str]
    problem: ProblemType
    task: GlueTask | None
    files: Sequence[Path]
    splits: Mapping[str, Sequence[LabelledText]]
    are_numbered: bool = False

    def classify(
        self,
        runner: Runner,
        tokenizer: AlbertTokenizer,
        splits: Mapping[str, Sequence[LabelledText]],
        *,
        length: int,
        truncation: bool = True,
    ) -> dict[str, TextPredictions]:
        """Classify the texts of each split."""
        task = self.task
        return {
            split: classify(
                runner,
                tokenizer,
                texts,
                self.names if task is None else task.labels or self.names,
                self.problem if task is None else task.problem,
                length=length,
                truncation=truncation,
                outputs=None if task is None else _outputs_of(task, self.names),
                head=self.head,
            )
            for split, texts in splits.items()
        }


def read_held_out(
    data: LabelledTexts, head: Task, names: Sequence[str], problem: ProblemType
) -> HeldOutTexts:
    """Read the held-out texts of a classifier."""
    task = TASKS.get(data.task or "")
    if task is None or data.task_folder is None:
        files = labelled_files(data.text_classification, "test", "validation")
        read = read_splits({_ONLY_SPLIT: files}, names, data.columns, problem)
        return HeldOutTexts(
            head=head,
            names=names,
            problem=problem,
            task=None,
            files=files,
            splits=read.texts,
            are_numbered=read.are_numbered,
        )
    splits = dev_files(task, data.task_folder)
    return HeldOutTexts(
        head=head,
        names=names,
        problem=problem,
        task=task,
        files=[file for files in splits.values() for file in files],
        splits={name: read_task(task, {name: files}).texts[name] for name, files in splits.items()},
    )


def classifier_data(
    data: LabelledTexts,
    named: Sequence[LabelledTexts],
    heads: Mapping[Task, object],
    hf: Mapping[str, Any],
) -> dict[Task, LabelledTexts]:
    """Return the data of each classifier that has data, by its head.

    Args:
        data: data of the default classifier, which may have none.
        named: data of the named classifiers.
        heads: heads of the checkpoint.
        hf: content of `config.json`.
    """
    by_head: dict[Task, LabelledTexts] = {}
    if data.text_classification or data.task in TASKS:
        by_head[CLASSIFICATION] = data
    for texts in named:
        head = find_head(hf, heads, texts.head or "")
        if head in by_head:
            raise EvaluationError(
                f"--head {texts.head} is the default classifier, which has data before --head. "
                "Remove one of the two."
            )
        by_head[head] = texts
    return by_head


def task_metrics(
    task: GlueTask | None, predictions: Mapping[str, TextPredictions]
) -> dict[str, Any]:
    """Return the metrics of all splits, including the official metrics of a GLUE task.

    Metrics of splits after the first, such as mismatched MNLI, contain the split's name. If a task
    has several official metrics, their mean is included, as in transformers' run_glue.
    """
    results: dict[str, Any] = {} if task is None else {f"{PREFIX}_task": task.title}
    official = () if task is None else task.metrics
    for number, (split, answers) in enumerate(predictions.items()):
        metrics = answers.figures(official)
        if len(official) > 1:
            values: dict[str, float] = {name: metrics[f"{PREFIX}_{name}"] for name in official}
            metrics[f"{PREFIX}_{COMBINED}"] = mean_metric(values)
        prefix = PREFIX if number == 0 else f"{PREFIX}_{split}"
        results |= {prefix + name.removeprefix(PREFIX): value for name, value in metrics.items()}
    return results


def _outputs_of(task: GlueTask, names: Sequence[str]) -> list[int]:
    """Return the model's output index for each label of the task, or for a regression's score.

    If the model's labels have no names, they are in the task's order.
    """
    if task.scale is not None:
        if len(names) == 1:
            return [0]
        raise EvaluationError(
            f"{task.title} is a regression; the checkpoint's classifier has {len(names)} labels."
        )
    indices = label_indices(names, task.labels)
    if len(names) == len(task.labels) == len(indices):
        return list(indices.values())
    numbers = range(len(task.labels))
    unnamed = ([f"label_{number}" for number in numbers], [str(number) for number in numbers])
    if list(map(label_key, names)) in unnamed:
        return list(numbers)
    raise EvaluationError(
        f"{task.title} has the labels {', '.join(task.labels)}; the checkpoint's classifier has "
        f"{listed(names)}."
    )
