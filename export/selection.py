"""The tasks of a bundle: the tasks that the last run trained, or the requested tasks.

Training changes the shared weights, so the tasks that a run does not train get worse. Their heads
are still in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Final

from albert_serve.bundle.weights import TaskName, task_of
from albert_serve.tasks.description import evaluated_quality
from export.config import ExportError
from export.source import Source
from training.model.heads import MULTIPLE_CHOICE

# A trained task is also omitted if it lost more than this fraction of its metric.
_MAX_LOSS: Final = 0.1


def select_tasks(
    source: Source, names: Collection[TaskName], measured: Collection[TaskName] = ()
) -> tuple[Source, dict[str, str]]:
    """Return the source with the tasks of the bundle, and the reason for each omitted task.

    Args:
        source: checkpoint with all tasks.
        names: tasks to export. Without names, the tasks that the last run trained are exported, or
            all tasks if the checkpoint has no record of its training.
        measured: tasks with labelled data, which are also exported.
    """
    missing = sorted({*names} - {*source.tasks})
    if missing:
        raise ExportError(
            f"--tasks {' '.join(missing)}: the checkpoint has only "
            f"{', '.join(source.tasks) or 'heads that are not served'}. Choose from these."
        )
    reasons = _untrained_tasks(source)
    if names:
        reasons = {task: "it is not among --tasks" for task in source.tasks if task not in names}
    reasons = {task: why for task, why in reasons.items() if task not in measured}
    heads = {head: entry for head, entry in source.heads.items() if task_of(head) not in reasons}
    if source.has_choices:
        if not heads:
            raise ExportError(
                "No head can be exported: multiple choice is not served, and no other head is "
                "selected. Measure multiple choice with `albert-serve evaluate "
                "--multiple-choice`, or select other heads with --tasks."
            )
        reasons[MULTIPLE_CHOICE] = "it is not served"
    return replace(source, heads=heads), reasons


def _untrained_tasks(source: Source) -> dict[str, str]:
    """Return the tasks that the last run did not train, or made worse, with the reason."""
    stages = source.training.get("stages")
    last = stages[-1] if isinstance(stages, list) and stages else None
    trained = last.get("tasks") if isinstance(last, dict) else None
    if not isinstance(last, dict) or not isinstance(trained, list):
        return {}
    names = {task_of(str(head)) for head in trained}
    before = last.get("before")
    previous = before if isinstance(before, dict) else {}
    reasons: dict[str, str] = {}
    for task in source.tasks:
        note, loss = _compare(source.evaluation, task, previous.get(task))
        if task not in names:
            reasons[task] = f"the last run did not train it{note}"
        elif loss > _MAX_LOSS:
            reasons[task] = f"it lost {100 * loss:.0f} % of its metric in the last run{note}"
    return reasons


def _compare(evaluation: Mapping[str, Any], task: str, previous: object) -> tuple[str, float]:
    """Describe a task's metric before and after the last run, and return the fraction lost."""
    current = evaluated_quality(evaluation, task)
    if not isinstance(previous, dict) or not isinstance(previous.get("percent"), int | float):
        return "", 0.0
    percent = previous["percent"]
    note = f": {previous.get('metric')} {percent:.1f} % before it"
    if current is None:
        return f"{note}, not measured after it", 0.0
    note += f", {current.percent:.1f} % after it"
    is_same = all(previous.get(key) == getattr(current, key) for key in ("metric", "count"))
    return note, 1 - current.percent / percent if is_same and percent > 0 else 0.0
