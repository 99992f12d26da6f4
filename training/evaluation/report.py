"""The report of an evaluation as Markdown: figures, confusion, calibration, worst examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from albert_serve.files import write_atomically
from training.evaluation.calibration import (
    NUM_BINS,
    Bin,
    expected_calibration_error,
    reliability,
)
from training.evaluation.choices import ChoicePredictions
from training.evaluation.classification import TextPredictions
from training.evaluation.early_exit import early_exit_figures
from training.evaluation.markdown import table
from training.evaluation.questions import AnsweredQuestion, predicted
from training.evaluation.squad import score_answer, version_of

_NUM_WORST: Final = 20
_NUM_CONFUSED: Final = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """What a checkpoint does on held-out data.

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
    figures = evaluation.figures
    numbers = [(key, v) for key, v in figures.items() if isinstance(v, int | float | str)]
    lines = [f"# Evaluation of {name}", "", *table(["figure", "value"], numbers)]
    for split, predictions in evaluation.texts.items():
        lines += [f"## Texts ({split})", "", *_text_section(predictions)]
    if evaluation.choices is not None:
        lines += ["## Multiple choice", "", *_choice_section(evaluation.choices)]
    if evaluation.questions:
        lines += ["## Questions", "", *_question_section(evaluation)]
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "report.md", ("\n".join(lines).rstrip() + "\n").encode())
    return folder / "report.md"


def _text_section(predictions: TextPredictions) -> list[str]:
    lines: list[str] = []
    if predictions.problem != "regression":
        rows = [[name, *each.values()] for name, each in predictions.classes().items()]
        lines += ["### Classes", "", *table(["class", "precision", "recall", "F1", "texts"], rows)]
        lines += _confusion(predictions)
        lines += _calibration(predictions.bins)
        lines += _early_exit(predictions)
    return [*lines, *_worst(worst_texts(predictions))]


def _confusion(predictions: TextPredictions) -> list[str]:
    """Return the pairs of labels that are confused most often."""
    pairs = [
        (label, other, count)
        for label, row in predictions.confusion.items()
        for other, count in row.items()
        if other != label
    ]
    rows = sorted(pairs, key=lambda pair: -pair[2])[:_NUM_CONFUSED]
    return ["### Confusion", "", *table(["label", "predicted", "texts"], rows)] if rows else []


def _calibration(bins: Sequence[Bin]) -> list[str]:
    return [
        "### Calibration",
        "",
        f"Expected calibration error: {expected_calibration_error(bins):.4f} ({NUM_BINS} bins).",
        "",
        *table(["confidence", "accuracy", "predictions"], bins),
    ]


def _early_exit(predictions: TextPredictions) -> list[str]:
    if predictions.layer_logits is None:
        return []
    metric = predictions.metric
    figures = early_exit_figures((metric,), predictions.layer_logits, predictions.targets)
    lines = ["### Early exit", ""]
    for rows in figures.values():
        lines += table(list(rows[0]), [list(row.values()) for row in rows]) if rows else []
    return lines


def _worst(worst: Sequence[Mapping[str, Any]]) -> list[str]:
    if not worst:
        return []
    return ["### Worst", "", *table(list(worst[0]), [list(each.values()) for each in worst])]


def _highest(losses: NDArray[Any]) -> list[int]:
    """Return the indices of the highest losses, the highest first."""
    worst: list[int] = np.argsort(-losses, kind="stable")[:_NUM_WORST].tolist()
    return worst


def worst_texts(predictions: TextPredictions) -> list[dict[str, Any]]:
    """Return the texts with the highest losses, the highest first."""
    worst = []
    for index in _highest(predictions.losses_N):
        text = predictions.texts[index]
        pair = {} if text.pair is None else {"text_pair": text.pair}
        worst.append(
            {
                "loss": float(predictions.losses_N[index]),
                "label": predictions.describe(predictions.targets[index]),
                "prediction": predictions.describe(predictions.predictions[index]),
                "text": text.text,
                **pair,
                "place": Path(text.place).name,
            }
        )
    return worst


def _choice_section(predictions: ChoicePredictions) -> list[str]:
    lines: list[str] = []
    groups = predictions.groups()
    if len(groups) > 1:
        rows = [[name or "all", *figures.values()] for name, figures in groups.items()]
        lines += table(["group", "accuracy", "loss", "questions"], rows)
    bins = reliability(predictions.confidences_Q, predictions.is_right_Q)
    return [*lines, *_calibration(bins), *_worst(worst_choices(predictions))]


def worst_choices(predictions: ChoicePredictions) -> list[dict[str, Any]]:
    """Return the questions of multiple choice with the highest losses, the highest first."""
    return [
        {
            "loss": float(predictions.losses_Q[index]),
            "answer": predictions.questions[index].choices[predictions.questions[index].label],
            "prediction": predictions.questions[index].choices[predictions.predictions_Q[index]],
            "question": predictions.questions[index].question or "",
            "context": predictions.questions[index].context,
            "place": Path(predictions.questions[index].place).name,
        }
        for index in _highest(predictions.losses_Q)
    ]


def _question_section(evaluation: Evaluation) -> list[str]:
    questions, threshold = evaluation.questions, evaluation.threshold
    confidences, scores = _question_scores(questions, threshold)
    bins = reliability(confidences, scores[:, 0] == 1)
    return [*_calibration(bins), *_worst(worst_questions(questions, threshold))]


def _question_scores(
    answered: Sequence[AnsweredQuestion], threshold: float
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the probability of each given answer, and its exact match and F1."""
    version = version_of([each.question for each in answered])
    confidences, scores = [], []
    for each in answered:
        text = each.best if version == "1.1" else predicted(each, threshold)
        is_given = bool(each.n_best) and text == each.best
        confidence = each.n_best[0][1] if is_given else each.no_answer
        if version == "1.1" and is_given and each.no_answer < 1:
            confidence = min(confidence / (1 - each.no_answer), 1.0)  # "no answer" is none
        confidences.append(confidence)
        scores.append(score_answer(each.question, text, version))
    return np.array(confidences), np.array(scores, float)


def worst_questions(answered: Sequence[AnsweredQuestion], threshold: float) -> list[dict[str, Any]]:
    """Return the questions with the lowest F1, the most confident answers first."""
    version = version_of([each.question for each in answered])
    confidences, scores = _question_scores(answered, threshold)
    order = np.lexsort((-confidences, scores[:, 1]))[:_NUM_WORST].tolist()
    return [
        {
            "F1": float(scores[index, 1]),
            "confidence": float(confidences[index]),
            "question": answered[index].question.question,
            "prediction": answered[index].best
            if version == "1.1"
            else predicted(answered[index], threshold),
            "answers": " / ".join(dict.fromkeys(answered[index].question.answers)),
            "id": answered[index].question.id,
        }
        for index in order
        if scores[index, 1] < 1
    ]
