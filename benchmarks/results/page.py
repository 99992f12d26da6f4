"""The tables of docs/results.md."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from benchmarks.harness.tables import bullets, table
from benchmarks.results.runs import SeedResult, TaskResults
from benchmarks.results.tasks import TASKS, Figure, Measure

Results: TypeAlias = Mapping[str, TaskResults]

_FIGURES: Final = ("task", "metric", "median", "lowest to highest", "runs", "chance", "ALBERT")
_BUDGETS: Final = ("task", "steps", "examples a step", "tokens", "minutes", "learning rate")
_METRIC_OF_LABELS: Final = "text_classification_classes"


def render(results: Results, initial: str, machine: Sequence[str]) -> str:
    """Return the tables of all tasks that have results, as Markdown.

    Args:
        initial: the name of the checkpoint that the runs started from.
        machine: its description.
    """
    finished = {name: runs for name, runs in results.items() if runs.has_row}
    trained = {name: runs.by_seed for name, runs in finished.items() if runs.by_seed}
    notes = [f"{_title(name)}: {TASKS[name].note}" for name in finished if TASKS[name].note]
    parts = [
        f"Initial checkpoint: `{initial}`. All figures are in percent.",
        table(_FIGURES, figure_rows(finished)),
        bullets(notes),
        "The training of each run (the median of the runs; minutes of training alone):",
        table(_BUDGETS, [_budget_row(name, by_seed) for name, by_seed in trained.items()]),
        bullets(machine),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def figure_rows(results: Results) -> Iterator[list[str]]:
    """Yield a row of each figure of each task."""
    for name, task in results.items():
        for measure in TASKS[name].measures:
            for number, figure in enumerate(measure.figures):
                title = measure.title if number == 0 else ""
                yield [title, figure.title, *_cells(measure, figure, task)]


def _cells(measure: Measure, figure: Figure, task: TaskResults) -> list[str]:
    figures = [run.figures[measure.title] for run in task.by_seed.values()]
    if not figures:  # the replacements diverged, too
        return ["-", "-", _num_runs(task), "-", figure.paper]
    # A correlation with answers that are all the same is undefined, and left out by evaluation.
    points = [100 * each.get(figure.key, 0.0) / (100 * figure.unit) for each in figures]
    return [
        f"{statistics.median(points):.1f}",
        f"{min(points):.1f} to {max(points):.1f}",
        _num_runs(task),
        f"{100 * chance(figure, figures[0]):.1f}",
        figure.paper,
    ]


def _num_runs(task: TaskResults) -> str:
    """Return the number of runs whose figures are shown, and how many others collapsed."""
    if task.all_collapsed:
        return f"all {task.num_collapsed} collapsed"
    collapsed = f" ({task.num_collapsed} collapsed)" if task.num_collapsed else ""
    return f"{len(task.by_seed)}{collapsed}"


def chance(figure: Figure, figures: Mapping[str, Any]) -> float:
    """Return the figure of one answer for all, from 0 to 1: the most frequent, or no answer."""
    metric = figure.key.partition("_classification_")[2]
    if figure.key == "multiple_choice_accuracy":
        return 0.25
    if figure.key.startswith("question_answering_best"):
        unanswered: int = figures.get("question_answering_no_answer_questions", 0)
        return unanswered / int(figures["question_answering_questions"])
    classes = figures.get(_METRIC_OF_LABELS, {})
    counts = [each["texts"] for each in classes.values()]
    if metric == "accuracy":
        return float(max(counts) / sum(counts))
    if metric == "f1":  # of the second label, given to all
        return float(2 * counts[1] / (counts[1] + sum(counts)))
    if metric == "macro_f1":  # that of the most frequent label, and 0 of the others
        part = max(counts) / sum(counts)
        return float(2 * part / (1 + part) / len(counts))
    return 0.0


def _budget_row(name: str, runs: Mapping[int, SeedResult]) -> list[str]:
    stages = [run.stage for run in runs.values()]
    steps, tokens, seconds = (
        statistics.median(stage[key] for stage in stages) for key in ("steps", "tokens", "seconds")
    )
    settings = stages[0]["settings"]
    return [
        _title(name),
        f"{steps:,.0f}",
        settings["batch_size"].strip("[]"),
        f"{tokens:,.0f}",
        f"{seconds / 60:.1f}",
        f"{float(settings['lr']):g}",
    ]


def _title(name: str) -> str:
    return ", ".join(measure.title for measure in TASKS[name].measures)
