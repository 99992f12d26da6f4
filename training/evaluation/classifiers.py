"""Held-out texts of a checkpoint's classifiers, their own or those of GLUE, and their figures."""

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

# The one split of the user's own files.
_ONLY: Final = "data"


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutTexts:
    """The texts that a classifier is measured on.

    Attributes:
        head: of the model.
        names: of the classifier's labels, in the order of its outputs.
        task: of GLUE; None for the user's own files.
        are_numbered: whether the files have the labels' numbers in place of their names.
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
    """Read the texts that a classifier is measured on."""
    task = TASKS.get(data.task or "")
    if task is None or data.task_folder is None:
        files = labelled_files(data.text_classification, "test", "validation")
        read = read_splits({_ONLY: files}, names, data.columns, problem)
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
    further: Sequence[LabelledTexts],
    heads: Mapping[Task, object],
    hf: Mapping[str, Any],
) -> dict[Task, LabelledTexts]:
    """Return the data of each classifier that has some, by its head.

    Args:
        data: of the default classifier, perhaps.
        heads: of the checkpoint.
        hf: content of its `config.json`.
    """
    by_head: dict[Task, LabelledTexts] = {}
    if data.text_classification or data.task in TASKS:
        by_head[CLASSIFICATION] = data
    for own in further:
        head = find_head(hf, heads, own.head or "")
        if head in by_head:
            raise EvaluationError(
                f"--head {own.head} is the default classifier, whose data stands before --head "
                "already; give one of the two"
            )
        by_head[head] = own
    return by_head


def task_figures(
    task: GlueTask | None, classified: Mapping[str, TextPredictions]
) -> dict[str, Any]:
    """Return the figures of all splits; of a task of GLUE with the official metrics.

    Figures of splits after the first (mismatched MNLI) have the split's name in theirs. Of several
    official metrics there is also the mean, as in transformers' run_glue.
    """
    results: dict[str, Any] = {} if task is None else {f"{PREFIX}_task": task.title}
    metrics = () if task is None else task.metrics
    for number, (split, answers) in enumerate(classified.items()):
        figures = answers.figures(metrics)
        if len(metrics) > 1:
            official: dict[str, float] = {each: figures[f"{PREFIX}_{each}"] for each in metrics}
            figures[f"{PREFIX}_{COMBINED}"] = mean_metric(official)
        prefix = PREFIX if number == 0 else f"{PREFIX}_{split}"
        results |= {prefix + name.removeprefix(PREFIX): value for name, value in figures.items()}
    return results


def _outputs_of(task: GlueTask, names: Sequence[str]) -> list[int]:
    """Return the model's output of each of the task's labels, or the one of a regression.

    Labels without names are in the task's order.
    """
    if task.scale is not None:
        if len(names) == 1:
            return [0]
        raise EvaluationError(
            f"{task.title} is a regression; the checkpoint's classifier has {len(names)} labels"
        )
    indices = label_indices(names, task.labels)
    if len(names) == len(task.labels) == len(indices):
        return list(indices.values())
    numbers = range(len(task.labels))
    unnamed = ([f"label_{number}" for number in numbers], [str(number) for number in numbers])
    if list(map(label_key, names)) in unnamed:
        return list(numbers)
    raise EvaluationError(
        f"the labels of {task.title} are {', '.join(task.labels)}; "
        f"those of the checkpoint's classifier are {listed(names)}"
    )
