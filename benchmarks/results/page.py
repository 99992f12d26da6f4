"""The tables of docs/measurements.md."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.harness.page import bullets, table
from benchmarks.results.tasks import RESULT_TASKS, Figure, Measure

_FIGURES: Final = (
    "task",
    "metric",
    "median",
    "lowest to highest",
    "runs",
    "chance",
    "BERT-Mini",
    "ALBERT",
)
_BUDGETS: Final = ("task", "steps", "examples a step", "tokens", "minutes", "learning rate")


@dataclass(frozen=True, kw_only=True, slots=True)
class SeedResult:
    """The figures of one run.

    Attributes:
        figures: of each measure of the task, by its title.
        stage: of the training, as `training.json` has it: settings, steps, tokens, seconds.
    """

    figures: Mapping[str, Mapping[str, Any]]
    stage: Mapping[str, Any]


def render(
    results: Mapping[str, Sequence[SeedResult]], initial: str, machine: Sequence[str]
) -> str:
    """Return the tables of all tasks as Markdown.

    Args:
        results: of the finished runs, by the task's name; at least one each.
        initial: the checkpoint that the runs started from, as `checkpoint_name` has it.
        machine: its description.
    """
    notes = [f"{_title(name)}: {RESULT_TASKS[name].note}" for name in results]
    parts = [
        f"Initial checkpoint: {initial}. All figures are in percent.",
        table(_FIGURES, [row for name, runs in results.items() for row in _rows(name, runs)]),
        bullets(note for note in notes if not note.endswith(": ")),
        "The training of each run (the median of the runs; minutes of training alone):",
        table(_BUDGETS, [_budget_row(name, runs) for name, runs in results.items()]),
        bullets(machine),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _rows(name: str, runs: Sequence[SeedResult]) -> Iterator[list[str]]:
    """Yield a row of each figure of a task."""
    for measure in RESULT_TASKS[name].measures:
        for number, figure in enumerate(measure.figures):
            title = measure.title if number == 0 else ""
            yield [title, figure.title, *_cells(measure, figure, runs)]


def _cells(measure: Measure, figure: Figure, runs: Sequence[SeedResult]) -> list[str]:
    figures = [run.figures[measure.title] for run in runs]
    # A correlation with answers that are all the same is undefined, and left out by evaluation.
    points = [each.get(figure.key, 0.0) / figure.unit for each in figures]
    by_chance = 100 * chance(figure, figures[0])
    num_no_better = sum(point <= by_chance for point in points)
    no_better = f" ({num_no_better} no better than chance)" if num_no_better else ""
    return [
        f"{statistics.median(points):.1f}",
        f"{min(points):.1f} to {max(points):.1f}",
        f"{len(runs)}{no_better}",
        f"{by_chance:.1f}",
        figure.mini,
        figure.paper,
    ]


def chance(figure: Figure, figures: Mapping[str, Any]) -> float:
    """Return the figure of one answer for all, from 0 to 1: the most frequent, or no answer."""
    if figure.key.startswith("question_answering_best"):
        unanswered: int = figures.get("question_answering_no_answer_questions", 0)
        return unanswered / int(figures["question_answering_questions"])
    classes = figures.get("text_classification_classes", {})
    counts = [each["texts"] for each in classes.values()]
    metric = figure.key.partition("_classification_")[2]
    if metric == "accuracy":
        return float(max(counts) / sum(counts))
    if metric == "f1":  # if every text gets the second label
        return float(2 * counts[1] / (counts[1] + sum(counts)))
    if metric == "macro_f1":  # the most frequent label's F1; the others' is 0
        part = max(counts) / sum(counts)
        return float(2 * part / (1 + part) / len(counts))
    return 0.0


def _budget_row(name: str, runs: Sequence[SeedResult]) -> list[str]:
    stages = [run.stage for run in runs]
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
    return ", ".join(measure.title for measure in RESULT_TASKS[name].measures)
