"""Figures are those of their definitions, calibrated; predictions have the official forms."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import softmax
from sklearn.metrics import confusion_matrix, log_loss
from torch import Tensor

from training.errors import EvaluationError, TrainingError
from training.evaluation import classifiers
from training.evaluation.classifiers import HeldOutTexts, classifier_data
from training.evaluation.prediction_files import write_glue, write_squad
from training.glue.tasks import TASKS
from training.options.labelled import LabelledTexts
from training.tasks.classification.files import LabelledText
from training.tasks.classification.metrics import (
    TextPredictions,
    calibration_error,
    calibration_metrics,
)
from training.tasks.question_answering.files import Question
from training.tasks.question_answering.metrics import (
    AnsweredQuestion,
    describe_threshold,
    question_metrics,
)

NAMES = ["bad", "$fair_$", "good|fine"]


def test_figures_of_labels_are_those_of_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(3, size=200).tolist()
    answers = TextPredictions(
        texts=[LabelledText(text="a", pair=None, label=label) for label in labels],
        names=NAMES,
        problem="single_label_classification",
        logits=rng.normal(size=(200, 3)).astype(np.float32),
    )
    figures = answers.figures()
    assert figures["text_classification_loss"] == pytest.approx(
        log_loss(answers.targets, softmax(answers.logits.astype(np.float64), axis=-1)), rel=1e-5
    )
    matrix = confusion_matrix(answers.targets, answers.logits.argmax(-1))
    confusion = figures["text_classification_confusion"]
    got = [[confusion[name].get(other, 0) for other in NAMES] for name in NAMES]
    assert got == matrix.tolist()


QUESTIONS = [
    Question(id="a", question="Who?", context="Ann left.", answers=("Ann",), start=0),
    Question(id="b", question="When?", context="Ann left.", answers=(), start=None),
    Question(id="c", question="Why?", context="Ann left.", answers=("left",), start=4),
]


def answered(*null_scores: float) -> list[AnsweredQuestion]:
    return [
        AnsweredQuestion(
            question=question, n_best=[("Ann", 0.7)], no_answer=0.3, null_score=null_score
        )
        for question, null_score in zip(QUESTIONS, null_scores, strict=True)
    ]


def test_questions_with_and_without_an_answer_have_figures_of_their_own() -> None:
    """Those with an answer have figures, too, if every question is to get one."""
    figures = question_metrics([*answered(-1.0, 2.0, 3.0), *answered(-1.0, -2.0, -3.0)[1:2]], 0.0)
    names = ("has_answer", "has_answer_always_answered", "no_answer")
    f1 = {name: figures[f"question_answering_{name}_f1"] for name in names}
    assert list(f1.values()) == [50, 50, 50]
    assert figures["question_answering_no_answer_questions"] == 2


@pytest.mark.parametrize(
    ("null_scores", "warning"),
    [
        ((-1.0, 2.0, -3.0), None),
        ((2.0, 1.0, 3.0), "0.0% of the questions have an answer"),
    ],
)
def test_a_threshold_that_tells_nothing(null_scores: tuple[float, ...], warning: str) -> None:
    """Where the one answerable question that is found has a higher null score than the other."""
    answers = answered(*null_scores)
    figures = question_metrics(answers, 0.0)
    threshold = figures["question_answering_best_f1_threshold"]
    assert math.isfinite(threshold)
    described = describe_threshold(answers, threshold)
    assert (described is None) if warning is None else (warning in str(described))


def test_answers_are_written_as_json(tmp_path: Path) -> None:
    file = tmp_path / "new" / "dev.json"
    files = write_squad(answered(-1.0, 2.0, math.inf), file, 0.0)
    assert [path.name for path in files] == ["dev.json", "dev_nbest.json", "dev_null_odds.json"]
    predictions, n_best, odds = (
        json.loads(path.read_text(), parse_constant=pytest.fail) for path in files
    )
    assert predictions == {"a": "Ann", "b": "", "c": ""}
    assert [tuple(each.values()) for each in n_best["a"]] == [("Ann", 0.7), ("", 0.3)]
    assert odds == {"a": -1, "b": 2, "c": 1e9}
    assert len(write_squad(answered(0, 0, 0), file, None)) == 2


@pytest.mark.parametrize(
    ("task", "expected"),
    [("sst2", ["1", "0"]), ("rte", ["not_entailment", "entailment"]), ("stsb", ["5.000", "0.000"])],
)
def test_predictions_of_glue(task: str, expected: list[str], tmp_path: Path) -> None:
    logits = np.array([[5.1], [-0.1]] if task == "stsb" else [[0, 1], [1, 0]], np.float32)
    glue = TASKS[task]
    texts = [LabelledText(text="a", pair=None, label=0)] * 2
    names = glue.labels or ["score"]
    answers = TextPredictions(texts=texts, names=names, problem=glue.problem, logits=logits)
    write_glue({"test": answers}, tmp_path / "a.tsv", glue)
    lines = (tmp_path / "a.tsv").read_text().splitlines()
    assert lines == ["index\tprediction", f"0\t{expected[0]}", f"1\t{expected[1]}"]
    write_glue({"matched": answers, "mismatched": answers}, tmp_path / "M.tsv", glue)
    assert (tmp_path / "M-m.tsv").read_text() == (tmp_path / "M-mm.tsv").read_text()


def test_predictions_of_own_files_are_names(tmp_path: Path) -> None:
    answers = TextPredictions(
        texts=[LabelledText(text="a", pair=None, label=(1.0, 0.0, 0.0))],
        names=["bad", "fair", "good"],
        problem="multi_label_classification",
        logits=np.array([[0.5, -0.5, 2]], np.float32),
    )
    write_glue({"data": answers}, tmp_path / "a.tsv", None)
    assert (tmp_path / "a.tsv").read_text() == "index\tprediction\n0\tbad,good\n"


def drawn(*, several: bool) -> tuple[Tensor, Tensor]:
    """Return logits, and labels drawn with their probabilities."""
    generator = torch.Generator().manual_seed(0)
    logits_NK = 2 * torch.randn(4000, 3, generator=generator)
    if several:
        return logits_NK, torch.bernoulli(logits_NK.sigmoid(), generator=generator).long()
    return logits_NK, torch.multinomial(logits_NK.softmax(-1), 1, generator=generator)[:, 0]


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("sharpness", [0.25, 5.0])
def test_the_temperature_is_the_factor_by_which_logits_are_too_sharp(
    several: bool, sharpness: float
) -> None:
    logits_NK, targets = drawn(several=several)
    figures = calibration_metrics(logits_NK * sharpness, targets)
    assert figures["temperature"] == pytest.approx(sharpness, rel=0.1)
    assert figures["calibration_error"] < 0.02 < 0.1 < figures["raw_calibration_error"]


def test_the_error_is_the_gap_of_each_bin_by_its_share() -> None:
    logits_NK = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6], [0.4, 0.6]]).log()
    assert calibration_error(logits_NK, torch.tensor([0, 1, 1, 1])) == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("task", "names", "expected"),
    [
        ("rte", ["Not_Entailment", "entailment"], [1, 0]),
        ("mnli", ["LABEL_0", "LABEL_1", "LABEL_2"], [0, 1, 2]),
        ("rte", ["yes", "no"], None),
    ],
)
def test_a_tasks_labels_are_found_by_name_or_in_its_order(
    task: str, names: list[str], expected: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(classifiers, "classify", lambda *_, outputs, **__: outputs)
    glue = TASKS[task]
    texts: Any = HeldOutTexts(
        head="text-classification",
        names=names,
        problem=glue.problem,
        task=glue,
        files=(),
        splits={},
    )
    if expected is not None:
        assert texts.classify(None, None, {"dev": []}, length=8)["dev"] == expected
        return
    with pytest.raises(EvaluationError, match=f"{glue.title} .*the checkpoint's classifier"):
        texts.classify(None, None, {"dev": []}, length=8)


def test_data_before_a_head_is_of_the_default_classifier() -> None:
    hf = {"albert_default_head": "mood", "albert_heads": {"thing": {}}}
    heads = {"text-classification": 2, "text-classification/thing": 3}
    data, thing, mood, other = (
        LabelledTexts(head=name, text_classification=(Path("a.csv"),))
        for name in (None, "thing", "mood", "other")
    )
    assert classifier_data(LabelledTexts(), [thing, mood], heads, hf) == {
        "text-classification/thing": thing,
        "text-classification": mood,
    }
    assert classifier_data(LabelledTexts(task="cola"), [], heads, hf).keys() == {
        "text-classification"
    }
    with pytest.raises(EvaluationError, match="--head mood is the default classifier"):
        classifier_data(data, [mood], heads, hf)
    with pytest.raises(TrainingError, match="mood, thing"):
        classifier_data(data, [other], heads, hf)
