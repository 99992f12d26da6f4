"""Labelled data of a bundle's heads, and the scores of answers to it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from albert_serve.bundle.manifest import TOKENIZER_FILE, ProblemType
from albert_serve.bundle.weights import CLASSIFICATION, TOKENS, TaskName
from albert_serve.tasks.base import EncoderInput
from albert_serve.tasks.question_answering.task import QuestionAnswering
from albert_serve.tasks.text_length import text_length
from albert_serve.tokenizer import AlbertTokenizer
from export.config import ExportConfig, ExportError
from export.source import Source
from training.data.labelled.entities import read_tagged
from training.data.labelled.folders import RACE, labelled_files
from training.data.labelled.texts import LabelledText, read_labelled
from training.data.questions import Question, read_squad
from training.data.streams import labelled_examples
from training.evaluation.glue import read_for_model
from training.evaluation.metrics import metric_figures, predictions_of
from training.evaluation.questions import PredictedAnswer, question_items, question_parameters
from training.evaluation.squad import score_answer, version_of
from training.evaluation.tokens import Entities, entity_figures, entity_items
from training.evaluation.torch_engine import EngineItem
from training.glue.files import dev_files
from training.glue.tasks import TASKS, Metric
from training.model.checkpoint import read_config
from training.model.labels import find_head
from training.options.labelled import LabelledTexts, with_task_data

# The name of the metric of labelled texts, and its key.
_METRICS: Final[Mapping[ProblemType, tuple[str, Metric]]] = {
    "single_label_classification": ("accuracy", "accuracy"),
    "multi_label_classification": ("subset accuracy", "subset_accuracy"),
    "regression": ("Pearson", "pearson"),
}


class Scored(NamedTuple):
    """A metric in percent, and the score of each answer, the higher the better."""

    percent: float
    scores: Sequence[float]


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledItems:
    """The labelled data of a head.

    Attributes:
        metric: its name.
        items: the inputs.
        files: their names.
        score: scores the answers to all items.
    """

    metric: str
    items: list[EngineItem]
    files: Sequence[Path]
    score: Callable[[list[Any]], Scored]


def tasks_with_data(config: ExportConfig) -> set[TaskName]:
    """Return the tasks that labelled data is given for."""
    texts = config.text_classification or config.task or config.heads
    given: dict[TaskName, object] = {
        CLASSIFICATION: texts,
        "question-answering": config.question_answering,
        "token-classification": config.token_classification,
    }
    return {task for task, data in given.items() if data}


def read_labelled_items(config: ExportConfig, source: Source) -> dict[str, LabelledItems]:
    """Read the labelled data of each head that has some.

    Raises:
        ExportError: there is data for a head that the checkpoint has not, or none in the files.
        TrainingError: a file cannot be read, or a label is not one of the model's.
    """
    if config.task == RACE:
        raise ExportError("--task RACE is multiple choice, which is not served. Leave it out")
    config = with_task_data(config)
    tokenizer = AlbertTokenizer.from_file(source.folder / TOKENIZER_FILE)
    for task in tasks_with_data(config) - source.tasks.keys():
        raise ExportError(
            f"there is data for {task}, but the checkpoint has "
            f"{', '.join(source.tasks) or 'no head'}. Leave the data out"
        )
    read = {
        head: _read_texts(texts, head, source, tokenizer)
        for head, texts in _classifiers(config, source).items()
    }
    if config.question_answering:
        read["question-answering"] = _read_questions(config, source, tokenizer)
    if config.token_classification:
        read[TOKENS] = _read_entities(config, source, tokenizer)
    for head, labelled in read.items():
        if not labelled.items:
            raise ExportError(f"{', '.join(map(str, labelled.files))}: no text for {head}")
    return read


def _classifiers(config: ExportConfig, source: Source) -> Mapping[str, LabelledTexts]:
    """Return the data of each classifier that has some."""
    data: dict[str, LabelledTexts] = {}
    if config.text_classification or config.task:
        data[CLASSIFICATION] = config
    for texts in config.heads:
        head = find_head(read_config(source.folder), source.heads, texts.head or "")
        if head in data:
            raise ExportError(
                f"--head {texts.head} is the default classifier, whose data stands before --head "
                "already; give one of the two"
            )
        data[head] = with_task_data(texts)
    return data


def _read_texts(
    data: LabelledTexts, head: str, source: Source, tokenizer: AlbertTokenizer
) -> LabelledItems:
    entry = source.heads[head]
    problem = entry.problem_type or "single_label_classification"
    files, texts = _labelled_texts(data, entry.labels or [], problem)
    length = text_length(head, source.training, source.config.max_positions)
    examples, num_long = labelled_examples(texts, tokenizer, length=length, truncation=True)
    if num_long:
        print(f"{head}: {num_long:,} texts were truncated to {length} tokens", file=sys.stderr)
    items = [
        EngineItem(
            inputs=[EncoderInput(ids=example.ids, types=example.types, task=head, rows=[0])],
            read=lambda logits: [logits[0][0]],
        )
        for example in examples
    ]
    targets = np.array([text.label for text in texts])
    name, metric = _METRICS[problem]
    score = partial(_score_texts, targets=targets, metric=metric)
    return LabelledItems(metric=name, items=items, files=files, score=score)


def _score_texts(logits: list[NDArray[Any]], targets: NDArray[Any], metric: Metric) -> Scored:
    logits_NK = np.stack(logits)
    several = targets.ndim > 1
    errors = np.abs(predictions_of(logits_NK, several=several) - targets)
    scores = -errors if metric == "pearson" else 1 - errors.reshape(len(errors), -1).any(-1)
    value = metric_figures((metric,), logits_NK, targets)[metric]
    return Scored(0.0 if math.isnan(value) else 100 * value, scores.tolist())


def _labelled_texts(
    data: LabelledTexts, names: Sequence[str], problem: ProblemType
) -> tuple[list[Path], list[LabelledText]]:
    """Return the files, and their texts with the numbers of the model's outputs as labels."""
    task = TASKS.get(data.task or "")
    if task is None or data.data is None:
        files = labelled_files(data.text_classification, "test", "validation")
        return files, read_labelled(files, names, data.columns, problem)[0]
    files = [file for split in dev_files(task, data.data).values() for file in split]
    return files, read_for_model(task, files, names)


def _read_questions(
    config: ExportConfig, source: Source, tokenizer: AlbertTokenizer
) -> LabelledItems:
    questions = read_squad(config.question_answering)
    positions = source.config.max_positions
    threshold = source.tasks["question-answering"].null_score_diff_threshold
    task = QuestionAnswering(
        tokenizer=tokenizer, max_positions=positions, null_score_diff_threshold=threshold
    )
    may_be_empty = any(question.start is None for question in questions)
    parameters = question_parameters(positions, may_be_empty=may_be_empty)
    items = [item for item in question_items(task, questions, parameters) if item is not None]
    if num_left_out := len(questions) - len(items):
        print(
            f"{num_left_out:,} questions are left out: they are empty, or too long for the model",
            file=sys.stderr,
        )
    score = partial(_score_questions, questions=_rights(items))
    return LabelledItems(metric="F1", items=items, files=config.question_answering, score=score)


def _rights(items: Sequence[EngineItem]) -> list[Any]:
    return [right for item in items for right in item.rights or ()]


def _score_questions(answers: list[PredictedAnswer], questions: Sequence[Question]) -> Scored:
    version = version_of(questions)
    pairs = zip(answers, questions, strict=True)
    scores = [score_answer(question, answer.text, version).f1 for answer, question in pairs]
    return Scored(100 * fmean(scores), scores)


def _read_entities(
    config: ExportConfig, source: Source, tokenizer: AlbertTokenizer
) -> LabelledItems:
    texts = read_tagged(config.token_classification)
    names = source.tasks[TOKENS].labels or []
    items = list(entity_items(texts, tokenizer, names, length=source.config.max_positions))
    score = partial(_score_entities, rights=_rights(items))
    files = config.token_classification
    return LabelledItems(metric="entity F1", items=items, files=files, score=score)


def _score_entities(answers: list[Entities], rights: Sequence[Entities]) -> Scored:
    """Return entity F1, and minus the number of entities that are missed or wrong."""
    pairs = list(zip(answers, rights, strict=True))
    total, _ = entity_figures(pairs)
    return Scored(100 * total["f1"], [-float(len(answer ^ right)) for answer, right in pairs])
