"""The tasks of a bundle: those that the checkpoint's last run trained, or those asked for.

Training a task moves the shared weights away from the tasks that are not trained beside it, whose
heads are still in the checkpoint.
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

# A trained task is left out as well if it lost more than this share of its figure.
_MOST_LOST: Final = 0.1


def select_tasks(
    source: Source, names: Collection[TaskName], measured: Collection[TaskName] = ()
) -> tuple[Source, dict[str, str]]:
    """Return the source with the tasks of the bundle, and why each other one is left out.

    Args:
        names: the tasks to export; empty for those that the last run trained, or for all heads
            where the checkpoint does not say what was trained.
        measured: tasks that are exported as well, since there is data for them.
    """
    missing = sorted({*names} - {*source.tasks})
    if missing:
        raise ExportError(
            f"--tasks {' '.join(missing)}: the checkpoint has {', '.join(source.tasks) or 'none'}"
        )
    reasons = _faults(source)
    if names:
        reasons = {task: "it is not among --tasks" for task in source.tasks if task not in names}
    reasons = {task: why for task, why in reasons.items() if task not in measured}
    heads = {head: entry for head, entry in source.heads.items() if task_of(head) not in reasons}
    if source.has_choices:
        if not heads:
            raise ExportError(
                "multiple choice is not served, and no other head is exported. Measure it with "
                "`albert-serve evaluate --multiple-choice`, or name other heads with --tasks"
            )
        reasons[MULTIPLE_CHOICE] = "it is not served"
    return replace(source, heads=heads), reasons


def _faults(source: Source) -> dict[str, str]:
    """Return why tasks are left out of an export that names none."""
    stages = source.training.get("stages")
    last = stages[-1] if isinstance(stages, list) and stages else None
    trained = last.get("tasks") if isinstance(last, dict) else None
    if not isinstance(last, dict) or not isinstance(trained, list):
        return {}
    names = {task_of(str(head)) for head in trained}
    before = last.get("before")
    figures = before if isinstance(before, dict) else {}
    reasons: dict[str, str] = {}
    for task in source.tasks:
        note, lost = _compare(source.evaluation, task, figures.get(task))
        if task not in names:
            reasons[task] = f"the last run did not train it{note}"
        elif lost > _MOST_LOST:
            reasons[task] = f"it lost {100 * lost:.0f} % of its figure in the last run{note}"
    return reasons


def _compare(evaluation: Mapping[str, Any], task: str, before: object) -> tuple[str, float]:
    """Describe a task's figures before the last run and after it, and return the share lost."""
    after = evaluated_quality(evaluation, task)
    if not isinstance(before, dict) or not isinstance(before.get("percent"), int | float):
        return "", 0.0
    note = f": {before.get('metric')} {before['percent']:.1f} % before it"
    if after is None:
        return f"{note}, after it not measured", 0.0
    note += f", {after.percent:.1f} % after it"
    is_same = all(before.get(key) == getattr(after, key) for key in ("metric", "count"))
    return note, 1 - after.percent / before["percent"] if is_same and before["percent"] > 0 else 0.0
