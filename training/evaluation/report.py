"""The report of an evaluation as Markdown: its figures as tables, and the worst examples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from albert_serve.files import write_atomically
from training.evaluation.choices import ChoicePredictions
from training.evaluation.classification import TextPredictions
from training.evaluation.markdown import table
from training.evaluation.questions import AnsweredQuestion, may_be_empty, predicted
from training.evaluation.squad import score_answer, version_of

_NUM_SHOWN: Final = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Results of evaluating a checkpoint on held-out data.

    Attributes:
        figures: by name.
        texts: the predictions for the texts of each split.
        choices: those for questions of multiple choice.
        questions: the answers to questions.
        threshold: the null score over which the answer to a question is empty.
    """

    figures: Mapping[str, Any]
    texts: Mapping[str, TextPredictions] = field(default_factory=dict)
    choices: ChoicePredictions | None = None
    questions: Sequence[AnsweredQuestion] = ()
    threshold: float = 0.0


def write_report(evaluation: Evaluation, name: str, folder: Path) -> Path:
    """Write `report.md`, and return its path.

    Args:
        name: of the checkpoint.

    Raises:
        OSError: the folder cannot be written to.
    """
    numbers = [(k, v) for k, v in evaluation.figures.items() if isinstance(v, int | float | str)]
    lines = [f"# Evaluation of {name}", "", *table(["figure", "value"], numbers)]
    for key, value in evaluation.figures.items():
        rows = _confused(value) if key.endswith("_confusion") else _rows(value)
        lines += _section(key, rows)
    for split, texts in evaluation.texts.items():
        lines += _section(f"Worst texts ({split})", list(_worst_texts(texts)))
    if evaluation.choices is not None:
        worst_choices = list(_worst_choices(evaluation.choices))
        lines += _section("Worst questions of multiple choice", worst_choices)
    lines += _section("Worst questions", list(_worst_questions(evaluation)))
    folder.mkdir(parents=True, exist_ok=True)
    content = "\n".join(lines).rstrip() + "\n"
    # The name of a file in it need not be UTF-8.
    write_atomically(folder / "report.md", content.encode(errors="backslashreplace"))
    return folder / "report.md"


def _section(title: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a table of rows of the same columns under a title; nothing without rows."""
    if not rows:
        return []
    return [f"## {title}", "", *table(list(rows[0]), [list(row.values()) for row in rows])]


def _rows(value: Any) -> Sequence[Mapping[str, Any]]:
    """Return the rows of a figure that is a table."""
    if isinstance(value, list):
        return value  # of rows
    if isinstance(value, dict):
        named = [(name, row) for name, row in value.items() if isinstance(row, dict)]
        return [{"": name, **row} for name, row in named]
    return []


def _confused(confusion: Mapping[str, Mapping[str, int]]) -> Sequence[Mapping[str, Any]]:
    """Return the pairs of labels that are confused most often."""
    pairs: list[dict[str, Any]] = [
        {"label": label, "predicted": other, "texts": count}
        for label, row in confusion.items()
        for other, count in row.items()
        if other != label
    ]
    return sorted(pairs, key=lambda pair: -pair["texts"])[:_NUM_SHOWN]


def _highest(losses: NDArray[Any]) -> list[int]:
    """Return the indices of the highest losses, the highest first."""
    worst: list[int] = np.argsort(-losses, kind="stable")[:_NUM_SHOWN].tolist()
    return worst


def _worst_texts(predictions: TextPredictions) -> Iterator[dict[str, Any]]:
    """Yield the texts with the highest losses."""
    for index in _highest(predictions.losses_N):
        text = predictions.texts[index]
        yield {
            "loss": float(predictions.losses_N[index]),
            "label": predictions.describe(predictions.targets[index]),
            "prediction": predictions.describe(predictions.predictions[index]),
            "text": text.text,
            "text_pair": text.pair or "",
            "place": Path(text.place).name,
        }


def _worst_choices(predictions: ChoicePredictions) -> Iterator[dict[str, Any]]:
    """Yield the questions of multiple choice with the highest losses."""
    for index in _highest(predictions.losses_Q):
        question = predictions.questions[index]
        yield {
            "loss": float(predictions.losses_Q[index]),
            "answer": question.choices[question.label],
            "prediction": question.choices[predictions.predictions_Q[index]],
            "question": question.question or "",
            "context": question.context,
            "place": Path(question.place).name,
        }


def _worst_questions(evaluation: Evaluation) -> Iterator[dict[str, Any]]:
    """Yield the questions with the lowest F1, the most confident answers first."""
    answered = evaluation.questions
    version = version_of([reply.question for reply in answered])
    is_empty_allowed = may_be_empty(answered)
    rows: list[dict[str, Any]] = []
    for reply in answered:
        text = predicted(reply, evaluation.threshold) if is_empty_allowed else reply.best
        is_given = bool(reply.n_best) and text == reply.best
        rows.append(
            {
                "F1": score_answer(reply.question, text, version).f1,
                "confidence": reply.n_best[0][1] if is_given else reply.no_answer,
                "question": reply.question.question,
                "prediction": text,
                "answers": " / ".join(dict.fromkeys(reply.question.answers)),
                "id": reply.question.id,
            }
        )
    rows.sort(key=lambda row: (row["F1"], -row["confidence"]))
    yield from (row for row in rows[:_NUM_SHOWN] if row["F1"] < 1)
