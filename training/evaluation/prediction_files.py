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

# The ends of the names of MNLI's two files.
_ENDS: Final[Mapping[str, str]] = MappingProxyType({"matched": "-m", "mismatched": "-mm"})
# In place of the infinite null score of a question without any span, which JSON has not.
_MOST: Final = 1e9


def write_glue(
    predictions: Mapping[str, TextPredictions], file: Path, task: GlueTask | None
) -> None:
    """Write a TSV file of `index` and `prediction` for each split.

    Of several splits the file's name gets an end: `MNLI-m.tsv` and `MNLI-mm.tsv` for `MNLI.tsv`.

    Args:
        task: None for the user's own files, whose predictions are the names of labels, with
            commas between several, or scores.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    for split, answers in predictions.items():
        end = _ENDS.get(split, f"-{split}") if len(predictions) > 1 else ""
        lines = ["index\tprediction"]
        lines += [
            f"{index}\t{_prediction(answers, value, task)}"
            for index, value in enumerate(answers.predictions)
        ]
        target = file.with_name(f"{file.stem}{end}{file.suffix}")
        write_atomically(target, ("\n".join(lines) + "\n").encode())
        print(f"{len(answers.texts):,} predictions ({split}) in {target}")


def _prediction(answers: TextPredictions, value: Any, task: GlueTask | None) -> str:
    if task is not None and task.scale is not None:
        least, most = task.scale
        return f"{min(max(float(value), least), most):.3f}"
    if task is not None and task.submitted == "numbers":
        return str(int(value))
    if answers.problem == "regression":
        return f"{float(value):.9g}"  # all digits of 32 bits
    return answers.describe(value)


def write_squad(
    answered: Sequence[AnsweredQuestion], file: Path, threshold: float | None
) -> list[Path]:
    """Write the answers as SQuAD's official scripts read them, and the best answers of each.

    The others stand beside the file, with `_nbest` and `_null_odds` in their names. Return all.

    Args:
        threshold: the null score over which the answer is empty; None if it never is. With one,
            the null scores are written, for `--na-prob-file` of the script of v2.0.
    """
    contents: dict[str, dict[str, Any]] = {
        "": {
            reply.question.id: reply.best if threshold is None else predicted(reply, threshold)
            for reply in answered
        },
        "_nbest": {
            reply.question.id: [
                {"text": text, "probability": probability} for text, probability in _ranked(reply)
            ]
            for reply in answered
        },
    }
    if threshold is not None:
        contents["_null_odds"] = {
            reply.question.id: _bounded(reply.null_score) for reply in answered
        }
    files = [file.with_name(f"{file.stem}{end}{file.suffix}") for end in contents]
    for target, content in zip(files, contents.values(), strict=True):
        _write_json(content, target)
    return files


def _write_json(content: Mapping[str, Any], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_atomically(file, text.encode())


def _ranked(answered: AnsweredQuestion) -> list[tuple[str, float]]:
    return sorted([*answered.n_best, ("", answered.no_answer)], key=lambda answer: -answer[1])


def _bounded(score: float) -> float:
    return score if math.isfinite(score) else math.copysign(_MOST, score)
