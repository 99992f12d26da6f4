"""Predictions in the official formats: GLUE's TSV files and SQuAD's JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from albert_serve.files import write_atomically
from training.glue.tasks import GlueTask
from training.tasks.classification.metrics import TextPredictions
from training.tasks.question_answering.metrics import AnsweredQuestion, predicted

# MNLI has two prediction files, whose names end in these suffixes.
_SUFFIXES: Final[Mapping[str, str]] = MappingProxyType({"matched": "-m", "mismatched": "-mm"})
# A question without spans has an infinite null score, which JSON cannot represent.
_MAX_NULL_SCORE: Final = 1e9


def write_glue(
    predictions: Mapping[str, TextPredictions], file: Path, task: GlueTask | None
) -> None:
    """Write a TSV file of `index` and `prediction` for each split.

    Several splits get suffixes: `MNLI.tsv` becomes `MNLI-m.tsv` and `MNLI-mm.tsv`.

    Args:
        task: GLUE task, or None for the user's own files. Their predictions are scores, or label
            names separated by commas.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    for split, answers in predictions.items():
        suffix = _SUFFIXES.get(split, f"-{split}") if len(predictions) > 1 else ""
        lines = ["index\tprediction"]
        lines += [
            f"{index}\t{_prediction(answers, value, task)}"
            for index, value in enumerate(answers.predictions)
        ]
        target = file.with_name(f"{file.stem}{suffix}{file.suffix}")
        write_atomically(target, ("\n".join(lines) + "\n").encode())
        print(f"{len(answers.texts):,} predictions ({split}) in {target}.")


def _prediction(answers: TextPredictions, value: Any, task: GlueTask | None) -> str:
    if task is not None and task.scale is not None:
        min_score, max_score = task.scale
        return f"{min(max(float(value), min_score), max_score):.3f}"
    if task is not None and task.submitted == "numbers":
        return str(int(value))
    if answers.problem == "regression":
        return f"{float(value):.9g}"  # nine digits represent a 32-bit float exactly
    return answers.describe(value)


def write_squad(
    answers: Sequence[AnsweredQuestion], file: Path, threshold: float | None
) -> list[Path]:
    """Write answers in the format of the official SQuAD scripts, and each question's best answers.

    Additional files are next to `file`, with `_nbest` and `_null_odds` in their names.

    Args:
        threshold: null score above which the answer is empty, or None if it never is. With a
            threshold, the null scores are written for the SQuAD 2.0 script's `--na-prob-file`.

    Returns:
        All written files.
    """
    contents: dict[str, dict[str, Any]] = {
        "": {
            reply.question.id: reply.best if threshold is None else predicted(reply, threshold)
            for reply in answers
        },
        "_nbest": {
            reply.question.id: [
                {"text": text, "probability": probability} for text, probability in _ranked(reply)
            ]
            for reply in answers
        },
    }
    if threshold is not None:
        contents["_null_odds"] = {
            reply.question.id: _bounded(reply.null_score) for reply in answers
        }
    files = [file.with_name(f"{file.stem}{suffix}{file.suffix}") for suffix in contents]
    for target, content in zip(files, contents.values(), strict=True):
        _write_json(content, target)
    return files


def _write_json(content: Mapping[str, Any], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_atomically(file, text.encode())


def _ranked(reply: AnsweredQuestion) -> list[tuple[str, float]]:
    return sorted([*reply.n_best, ("", reply.no_answer)], key=lambda answer: -answer[1])


def _bounded(score: float) -> float:
    return score if math.isfinite(score) else math.copysign(_MAX_NULL_SCORE, score)
