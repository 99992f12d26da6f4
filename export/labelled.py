"""Labelled data of a bundle's heads, and the scores of answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from albert_serve.bundle.manifest import TOKENIZER_FILE, ProblemType
from albert_serve.bundle.weights import CLASSIFICATION, TOKENS, TaskName
from albert_serve.tasks.base import Runner
from albert_serve.tasks.question_answering.task import QuestionAnswering
from albert_serve.tasks.text_length import text_length
from albert_serve.tokenizer import AlbertTokenizer
from export.config import ExportConfig, ExportError
from export.source import Source
from training.data.labelled.folders import RACE
from training.evaluation.classifiers import classifier_data, read_held_out
from training.glue.tasks import Metric
from training.model.checkpoint import read_config
from training.model.heads import Task
from training.options.labelled import LabelledTexts
from training.tasks.metrics import compute_metrics, predictions_of
from training.tasks.question_answering.files import read_squad
from training.tasks.question_answering.metrics import (
    answer_items,
    prepare_questions,
    question_parameters,
    score_answers,
)
from training.tasks.token_classification.files import read_tagged
from training.tasks.token_classification.metrics import (
    entity_items,
    entity_metrics,
    predict_entities,
)

# Displayed name and key of the metric of labelled texts, by their problem type.
_METRICS: Final[Mapping[ProblemType, tuple[str, Metric]]] = {
    "single_label_classification": ("accuracy", "accuracy"),
    "multi_label_classification": ("subset accuracy", "subset_accuracy"),
    "regression": ("Pearson", "pearson"),
}


class Measurement(NamedTuple):
    """Quality of a runner's answers.

    Attributes:
        percent: metric in percent.
        scores: score of each answer. Higher scores are better.
        num_truncated: number of truncated texts.
    """

    percent: float
    scores: Sequence[float]
    num_truncated: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledData:
    """The labelled data of a head.

    Attributes:
        metric: displayed name of the metric.
        files: files of the data.
        measure: function that scores a runner's answers to all of the data.
    """

    metric: str
    files: Sequence[Path]
    measure: Callable[[Runner], Measurement]


def tasks_with_data(config: ExportConfig) -> set[TaskName]:
    """Return the tasks that have labelled data."""
    texts = config.text_classification or config.task or config.heads
    data_of: dict[TaskName, object] = {
        CLASSIFICATION: texts,
        "question-answering": config.question_answering,
        "token-classification": config.token_classification,
    }
    return {task for task, data in data_of.items() if data}


def read_labelled_data(config: ExportConfig, source: Source) -> dict[str, LabelledData]:
    """Read the labelled data, by head."""
    if config.task == RACE:
        raise ExportError("--task RACE is multiple choice, which is not served. Omit the option.")
    tokenizer = AlbertTokenizer.from_file(source.folder / TOKENIZER_FILE)
    for task in tasks_with_data(config) - {*source.tasks}:
        raise ExportError(
            f"There is data for {task}, but the checkpoint has "
            f"{', '.join(source.tasks) or 'no head'}. Omit the data."
        )
    labelled = {
        head: _read_texts(texts, head, source, tokenizer)
        for head, texts in classifier_data(
            config, config.heads, source.heads, read_config(source.folder)
        ).items()
    }
    if config.question_answering:
        labelled["question-answering"] = _read_questions(config, source, tokenizer)
    if config.token_classification:
        labelled[TOKENS] = _read_entities(config, source, tokenizer)
    return labelled


def _read_texts(
    data: LabelledTexts, head: Task, source: Source, tokenizer: AlbertTokenizer
) -> LabelledData:
    entry = source.heads[head]
    problem = entry.problem_type or "single_label_classification"
    length = text_length(head, source.training, source.config.max_positions)
    held_out = read_held_out(data, head, entry.labels or [], problem)
    name, metric = _METRICS[problem]

    def measure(runner: Runner) -> Measurement:
        splits = held_out.classify(runner, tokenizer, held_out.splits, length=length)
        classified = list(splits.values())
        logits_NK, targets_N = (
            np.concatenate([getattr(part, name) for part in classified])
            for name in ("logits", "targets")
        )
        num_truncated = sum(part.num_truncated for part in classified)
        return _score_texts(logits_NK, targets_N, metric)._replace(num_truncated=num_truncated)

    return LabelledData(metric=name, files=held_out.files, measure=measure)


def _score_texts(logits_NK: NDArray[Any], targets_N: NDArray[Any], metric: Metric) -> Measurement:
    several = metric == "subset_accuracy"
    errors = np.abs(predictions_of(logits_NK, several=several) - targets_N)
    scores = -errors if metric == "pearson" else 1 - errors.reshape(len(errors), -1).any(-1)
    value = compute_metrics((metric,), logits_NK, targets_N)[metric]
    return Measurement(0.0 if math.isnan(value) else 100 * value, scores.tolist())


def _read_questions(
    config: ExportConfig, source: Source, tokenizer: AlbertTokenizer
) -> LabelledData:
    positions = source.config.max_positions
    task = QuestionAnswering(tokenizer=tokenizer, max_positions=positions)
    parameters = question_parameters(positions, may_be_empty=True)
    items = prepare_questions(task, read_squad(config.question_answering), parameters)
    threshold = source.heads["question-answering"].null_score_diff_threshold or 0.0

    def measure(runner: Runner) -> Measurement:
        scores = [score.f1 for score in score_answers(answer_items(runner, items), threshold)]
        return Measurement(100 * fmean(scores), scores)

    return LabelledData(metric="F1", files=config.question_answering, measure=measure)


def _read_entities(
    config: ExportConfig, source: Source, tokenizer: AlbertTokenizer
) -> LabelledData:
    texts = read_tagged(config.token_classification)
    names = source.heads[TOKENS].labels or []
    items = list(entity_items(texts, tokenizer, names, length=source.config.max_positions))

    def measure(runner: Runner) -> Measurement:
        answered = predict_entities(runner, items)
        total, _ = entity_metrics(answered)
        # Each missing or wrong entity lowers a text's score by 1.
        scores = [-float(len(predicted ^ correct)) for predicted, correct in answered]
        return Measurement(100 * total["f1"], scores)

    return LabelledData(metric="entity F1", files=config.token_classification, measure=measure)
