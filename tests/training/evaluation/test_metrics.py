"""Metrics match their definitions; prediction files have the official formats."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import softmax
from sklearn.metrics import confusion_matrix, log_loss

from albert_serve.tasks.question_answering.task import QuestionAnswering
from albert_serve.tokenizer import AlbertTokenizer
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
    fit_temperature,
)
from training.tasks.metrics import mean_metric
from training.tasks.question_answering.files import Question
from training.tasks.question_answering.metrics import (
    AnsweredQuestion,
    describe_threshold,
    prepare_questions,
    question_metrics,
    question_parameters,
)

NAMES = ["bad", "$fair_$", "good|fine"]


def test_metrics_of_labels_are_those_of_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(3, size=200).tolist()
    answers = TextPredictions(
        texts=[LabelledText(text="a", pair=None, label=label) for label in labels],
        names=NAMES,
        problem="single_label_classification",
        logits=rng.normal(size=(200, 3)).astype(np.float32),
    )
    metrics = answers.figures()
    assert metrics["text_classification_loss"] == pytest.approx(
        log_loss(answers.targets, softmax(answers.logits.astype(np.float64), axis=-1)), rel=1e-5
    )
    matrix = confusion_matrix(answers.targets, answers.logits.argmax(-1))
    confusion = metrics["text_classification_confusion"]
    counts = [[confusion[name].get(predicted, 0) for predicted in NAMES] for name in NAMES]
    assert counts == matrix.tolist()


QUESTIONS = [
    Question(id="a", question="Who?", context="Ann left.", answers=("Ann",), start=0),
    Question(id="b", question="When?", context="Ann left.", answers=(), start=None),
    Question(id="c", question="Why?", context="Ann left.", answers=("left",), start=4),
]


def answered(*null_scores: float) -> list[AnsweredQuestion]:
    """Return answers to the three questions, which repeat."""
    return [
        AnsweredQuestion(
            question=question, n_best=[("Ann", 0.7)], no_answer=0.3, null_score=null_score
        )
        for question, null_score in zip(cycle(QUESTIONS), null_scores, strict=False)
    ]


def test_questions_with_and_without_an_answer_have_separate_metrics() -> None:
    """`has_answer_always_answered` scores the best answer, whatever the null score."""
    metrics = question_metrics([*answered(-1.0, 2.0, 3.0), *answered(-1.0, -2.0, -3.0)[1:2]], 0.0)
    names = ("has_answer", "has_answer_always_answered", "no_answer")
    f1 = {name: metrics[f"question_answering_{name}_f1"] for name in names}
    assert list(f1.values()) == [50, 50, 50]
    assert metrics["question_answering_no_answer_questions"] == 2
    # If every question has an answer, the null scores are ignored.
    assert question_metrics(answered(9.0, 9.0, 9.0)[::2], 0.0)["question_answering_f1"] == 50


def test_repeated_ids_and_empty_questions_are_listed(tokenizer: AlbertTokenizer) -> None:
    task = QuestionAnswering(tokenizer=tokenizer, max_positions=64)
    parameters = question_parameters(64, may_be_empty=True)
    questions = [*QUESTIONS, QUESTIONS[0], replace(QUESTIONS[1], question=" ")]
    with pytest.raises(EvaluationError) as caught:
        prepare_questions(task, questions, parameters)
    assert caught.value.args == (
        "Several questions have the same id, for 2 ids: a, b. Use unique ids.",
        "question b: The question is empty, or too long for the model.",
    )


def test_a_threshold_with_less_than_one_percent_of_answers_gives_a_warning() -> None:
    for num_answered, is_useless in ((0, True), (1, False), (99, False), (100, True)):
        answers = answered(*[0.0] * num_answered, *[0.5] * (100 - num_answered))
        warning = str(describe_threshold(answers, 0.0))
        assert (f", {num_answered}.0% of the questions have an answer" in warning) == is_useless


def test_answers_are_written_as_json(tmp_path: Path) -> None:
    file = tmp_path / "new" / "dev.json"
    files = write_squad(answered(-1.0, 2.0, math.inf), file, 0.0)
    assert [path.name for path in files] == ["dev.json", "dev_nbest.json", "dev_null_odds.json"]
    predictions, n_best, odds = (
        json.loads(path.read_text(), parse_constant=pytest.fail) for path in files
    )
    assert predictions == {"a": "Ann", "b": "", "c": ""}
    assert [tuple(answer.values()) for answer in n_best["a"]] == [("Ann", 0.7), ("", 0.3)]
    assert odds == {"a": -1, "b": 2, "c": 1e9}
    assert len(write_squad(answered(0, 0, 0), file, None)) == 2


@pytest.mark.parametrize(
    ("task", "expected"),
    [("sst2", ["1", "0"]), ("rte", ["not_entailment", "entailment"]), ("stsb", ["5.000", "0.000"])],
)
def test_predictions_have_the_glue_format(task: str, expected: list[str], tmp_path: Path) -> None:
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


def test_predictions_of_a_users_texts_are_label_names(tmp_path: Path) -> None:
    answers = TextPredictions(
        texts=[LabelledText(text="a", pair=None, label=(1.0, 0.0, 0.0))],
        names=["bad", "fair", "good"],
        problem="multi_label_classification",
        logits=np.array([[0.5, -0.5, 2]], np.float32),
    )
    write_glue({"data": answers}, tmp_path / "a.tsv", None)
    assert (tmp_path / "a.tsv").read_text() == "index\tprediction\n0\tbad,good\n"


def test_several_official_metrics_of_a_glue_task_have_a_mean() -> None:
    """As in run_glue of transformers, the F1 and the accuracy of MRPC."""
    assert mean_metric({"f1": 0.5, "accuracy": 0.25}) == 0.375


@pytest.mark.parametrize("is_multi_label", [False, True])
@pytest.mark.parametrize("sharpness", [0.25, 5.0])
def test_the_temperature_undoes_too_sharp_logits(is_multi_label: bool, sharpness: float) -> None:
    """The labels are sampled with the probabilities of the logits."""
    generator = torch.Generator().manual_seed(0)
    logits_NK = 2 * torch.randn(4000, 3, generator=generator)
    if is_multi_label:
        targets = torch.bernoulli(logits_NK.sigmoid(), generator=generator).long()
    else:
        targets = torch.multinomial(logits_NK.softmax(-1), 1, generator=generator)[:, 0]
    metrics = calibration_metrics(logits_NK * sharpness, targets)
    assert metrics["temperature"] == pytest.approx(sharpness, rel=0.1)
    assert metrics["calibration_error"] < 0.02 < 0.1 < metrics["raw_calibration_error"]


def test_the_temperature_of_right_predictions_has_smoothed_targets() -> None:
    """With two texts, a smoothed target is 7/8 (Platt scaling)."""
    one_label = fit_temperature(torch.tensor([[1.0, -1.0], [-1.0, 1.0]]), torch.tensor([0, 1]))
    assert one_label == pytest.approx(2 / math.log(7), rel=1e-3)
    several_labels = fit_temperature(torch.ones(2, 3), torch.ones(2, 3))
    assert several_labels == pytest.approx(1 / math.log(7), rel=1e-3)


def test_the_calibration_error_is_the_weighted_mean_gap_of_the_bins() -> None:
    """There are 15 bins, of which 0.66 and 0.68 are in different ones."""
    rows = [[0.9, 0.1], [0.4, 0.6], [0.66, 0.34], [0.68, 0.32], [0.95, 0.05], [1.0, 0.0]]
    error = calibration_error(torch.tensor(rows).log(), torch.tensor([0, 1, 0, 1, 0, 1]))
    assert error == pytest.approx((0.1 + 0.4 + 0.34 + 0.68 + (1 - 0.05)) / 6)


@pytest.mark.parametrize(
    ("task", "names", "expected"),
    [
        ("rte", ["Not_Entailment", "entailment"], [1, 0]),
        ("mnli", ["LABEL_0", "LABEL_1", "LABEL_2"], [0, 1, 2]),
        ("rte", ["yes", "no"], None),
        ("rte", ["entailment", "not_entailment", "other"], None),
        ("stsb", ["similarity"], [0]),
        ("stsb", ["low", "high"], None),
    ],
)
def test_labels_of_a_task_are_matched_by_name_or_order(
    task: str, names: list[str], expected: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(classifiers, "classify", lambda *_, outputs, **__: outputs)
    glue = TASKS[task]
    head, problem = "text-classification", glue.problem
    texts: Any = HeldOutTexts(
        head=head, names=names, problem=problem, task=glue, files=(), splits={}
    )
    message = f"{glue.title} .*the checkpoint's classifier"
    rejection = pytest.raises(EvaluationError, match=message)
    with nullcontext() if expected else rejection:
        assert texts.classify(None, None, {"dev": []}, length=8)["dev"] == expected


def test_data_before_head_belongs_to_the_default_classifier() -> None:
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
    cola = LabelledTexts(task="cola")
    assert classifier_data(cola, [], heads, hf) == {"text-classification": cola}
    with pytest.raises(EvaluationError, match="--head mood is the default classifier"):
        classifier_data(data, [mood], heads, hf)
    with pytest.raises(TrainingError, match="mood, thing"):
        classifier_data(data, [other], heads, hf)
