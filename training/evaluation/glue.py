"""Evaluation of a classifier on the held-out files of a GLUE task, by the official metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from albert_serve.bundle.weights import CLASSIFICATION
from albert_serve.names import listed
from albert_serve.tasks.base import Runner
from albert_serve.tokenizer import AlbertTokenizer
from training.data.labelled.label_names import label_indices, label_key
from training.data.labelled.texts import LabelledText
from training.errors import EvaluationError
from training.evaluation.classification import PREFIX, TextPredictions, classify
from training.evaluation.metrics import COMBINED, mean_metric
from training.glue.tasks import GlueTask
from training.model.heads import Task


def classify_task(
    runner: Runner,
    tokenizer: AlbertTokenizer,
    task: GlueTask,
    names: Sequence[str],
    texts: Mapping[str, Sequence[LabelledText]],
    *,
    length: int,
    truncation: bool = True,
    head: Task = CLASSIFICATION,
) -> dict[str, TextPredictions]:
    """Classify the texts of each split of a task.

    Args:
        names: of the model's labels, in the order of its outputs.
        length, truncation: as in `classify`.
        head: the classifier.
    """
    outputs = _outputs_of(task, names)
    return {
        split: classify(
            runner,
            tokenizer,
            its_texts,
            task.labels or names,
            task.problem,
            length=length,
            truncation=truncation,
            outputs=outputs,
            head=head,
        )
        for split, its_texts in texts.items()
    }


def task_figures(task: GlueTask, classified: Mapping[str, TextPredictions]) -> dict[str, Any]:
    """Return the figures of a task's splits, with the official metrics.

    Figures of splits after the first (mismatched MNLI) have the split's name in theirs. Of several
    official metrics there is also the mean, as in transformers' run_glue.
    """
    results: dict[str, Any] = {f"{PREFIX}_task": task.title}
    for number, (split, answers) in enumerate(classified.items()):
        figures = answers.figures(task.metrics)
        if len(task.metrics) > 1:
            official: dict[str, float] = {
                metric: figures[f"{PREFIX}_{metric}"] for metric in task.metrics
            }
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
