"""The report of an evaluation: Markdown with charts, and the same as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
from training.evaluation.choices import Chosen
from training.evaluation.classification import Classified
from training.evaluation.depth import depth_figures
from training.evaluation.questions import AnsweredQuestion, predicted
from training.evaluation.reports.charts import (
    draw_confusion,
    draw_depths,
    draw_reliability,
    draw_scores,
)
from training.evaluation.reports.tables import table
from training.evaluation.results import Results
from training.evaluation.squad import score_answer, version_of

_NUM_WORST: Final = 20
# A confusion matrix of more labels is not drawn; its pairs are listed.
_MOST_DRAWN: Final = 100
_NUM_CONFUSED: Final = 20


def write_report(results: Results, name: str, folder: Path) -> None:
    """Write `report.md` with its charts, and `report.json`.

    Args:
        name: of the checkpoint.

    Raises:
        OSError: the folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    numbers = [(key, v) for key, v in results.figures.items() if isinstance(v, int | float | str)]
    lines = [f"# Evaluation of {name}", "", *table(["figure", "value"], numbers)]
    worst: dict[str, list[dict[str, Any]]] = {}
    for split, classified in results.classified.items():
        worst[split] = worst_texts(classified)
        lines += _classification_part(split, classified, worst[split], folder)
    if results.chosen is not None:
        worst["choices"] = worst_choices(results.chosen)
        lines += _choice_part(results.chosen, worst["choices"], folder)
    if results.answered:
        worst["questions"] = worst_questions(results.answered, results.threshold)
        lines += _question_part(results, worst["questions"], folder)
    content = {"checkpoint": name, "figures": dict(results.figures), "worst": worst}
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_atomically(folder / "report.json", text.encode())
    write_atomically(folder / "report.md", ("\n".join(lines).rstrip() + "\n").encode())


def _classification_part(
    split: str, classified: Classified, worst: Sequence[Mapping[str, Any]], folder: Path
) -> list[str]:
    lines = [f"## Texts ({split})", ""]
    if classified.problem == "regression":
        image = f"{split}-scores.png"
        draw_scores(classified.targets, classified.predictions, folder / image)
        lines += [f"![Predictions over scores]({image})", ""]
    else:
        classes = classified.classes()
        rows = [[name, *each.values()] for name, each in classes.items()]
        lines += ["### Classes", "", *table(["class", "precision", "recall", "F1", "texts"], rows)]
        lines += _confusion_part(split, classified, folder)
        lines += _calibration_part(split, classified.bins, folder)
        lines += _depth_part(split, classified, folder)
    return [*lines, *_worst_part(worst)]


def _confusion_part(split: str, classified: Classified, folder: Path) -> list[str]:
    if not classified.confusion:
        return []
    lines = ["### Confusion", ""]
    if len(classified.names) <= _MOST_DRAWN:
        image = f"{split}-confusion.png"
        draw_confusion(classified.names, classified.confusion_KK, folder / image)
        lines += [f"![Confusion matrix]({image})", ""]
    pairs = [
        (count, label, other)
        for label, row in classified.confusion.items()
        for other, count in row.items()
        if other != label
    ]
    pairs = sorted(pairs, key=lambda pair: -pair[0])[:_NUM_CONFUSED]
    rows = [(label, other, count) for count, label, other in pairs]
    return [*lines, *table(["label", "predicted", "texts"], rows)] if rows else lines


def _calibration_part(part: str, bins: Sequence[Bin], folder: Path) -> list[str]:
    image = f"{part}-reliability.png"
    draw_reliability(bins, folder / image)
    return [
        "### Calibration",
        "",
        f"Expected calibration error: {expected_calibration_error(bins):.4f} ({NUM_BINS} bins).",
        "",
        f"![Reliability diagram]({image})",
        "",
        *table(["confidence", "accuracy", "predictions"], bins),
    ]


def _depth_part(split: str, classified: Classified, folder: Path) -> list[str]:
    if classified.layer_logits is None:
        return []
    metric = classified.metric
    figures = depth_figures((metric,), classified.layer_logits, classified.targets)
    image = f"{split}-depths.png"
    draw_depths(figures["by_layer"], figures["by_patience"], metric, folder / image)
    name = metric.replace("_", " ").capitalize()
    lines = ["### Depth", "", f"![{name} over the number of layers]({image})", ""]
    for rows in figures.values():
        lines += table(list(rows[0]), [list(row.values()) for row in rows]) if rows else []
    return lines


def _worst_part(worst: Sequence[Mapping[str, Any]]) -> list[str]:
    if not worst:
        return []
    return ["### Worst", "", *table(list(worst[0]), [list(each.values()) for each in worst])]


def _highest(losses: NDArray[Any]) -> list[int]:
    """Return the indices of the highest losses, the highest first."""
    worst: list[int] = np.argsort(-losses, kind="stable")[:_NUM_WORST].tolist()
    return worst


def worst_texts(classified: Classified) -> list[dict[str, Any]]:
    """Return the texts with the highest losses, the highest first."""
    worst = []
    for index in _highest(classified.losses_N):
        text = classified.texts[index]
        pair = {} if text.pair is None else {"text_pair": text.pair}
        worst.append(
            {
                "loss": float(classified.losses_N[index]),
                "label": classified.describe(classified.targets[index]),
                "prediction": classified.describe(classified.predictions[index]),
                "text": text.text,
                **pair,
                "place": Path(text.place).name,
            }
        )
    return worst


def _choice_part(chosen: Chosen, worst: Sequence[Mapping[str, Any]], folder: Path) -> list[str]:
    lines = ["## Multiple choice", ""]
    groups = chosen.groups()
    if len(groups) > 1:
        rows = [[name or "all", *figures.values()] for name, figures in groups.items()]
        lines += table(["group", "accuracy", "loss", "questions"], rows)
    bins = reliability(chosen.confidences_Q, chosen.is_right_Q)
    return [*lines, *_calibration_part("choices", bins, folder), *_worst_part(worst)]


def worst_choices(chosen: Chosen) -> list[dict[str, Any]]:
    """Return the questions of multiple choice with the highest losses, the highest first."""
    return [
        {
            "loss": float(chosen.losses_Q[index]),
            "answer": chosen.questions[index].choices[chosen.questions[index].label],
            "prediction": chosen.questions[index].choices[chosen.predictions_Q[index]],
            "question": chosen.questions[index].question or "",
            "context": chosen.questions[index].context,
            "place": Path(chosen.questions[index].place).name,
        }
        for index in _highest(chosen.losses_Q)
    ]


def _question_part(results: Results, worst: Sequence[Mapping[str, Any]], folder: Path) -> list[str]:
    confidences, scores = _question_scores(results.answered, results.threshold)
    bins = reliability(confidences, scores[:, 0] == 1)
    return ["## Questions", "", *_calibration_part("questions", bins, folder), *_worst_part(worst)]


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
