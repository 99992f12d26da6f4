"""Labelled data of a bundle's heads, and the scores of answers to it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from albert_serve.bundle.manifest import ProblemType
from albert_serve.bundle.weights import CLASSIFICATION, TOKENS, TaskName
from albert_serve.tasks.base import EncoderInput, Logits
from albert_serve.tasks.question_answering.task import QuestionAnswering
from albert_serve.tasks.text_length import text_length
from albert_serve.tokenizer import AlbertTokenizer
from export.config import ExportConfig
from export.errors import ExportError
from export.source import Source
from training.data.labelled.entities import read_tagged
from training.data.labelled.folders import RACE, labelled_files
from training.data.labelled.texts import Label, LabelledText, read_labelled
from training.data.questions import Question, read_squad
from training.data.streams import labelled_examples
from training.evaluation.glue import read_for_model
from training.evaluation.metrics import metric_figures
from training.evaluation.questions import PredictedAnswer, question_items, question_parameters
from training.evaluation.squad import score_answer, version_of
from training.evaluation.tokens import Entities, entity_figures, entity_items
from training.evaluation.torch_engine import EngineItem
from training.glue.files import dev_files
from training.glue.tasks import TASKS
from training.model.checkpoint import read_config
from training.model.labels import find_head
from training.options.labelled import LabelledTexts, with_task_data

_Scores: TypeAlias = Callable[[Sequence[Any], Sequence[Any]], list[float]]
_Metric: TypeAlias = Callable[[Sequence[Any], Sequence[Any]], float]


def _score_equal(answers: Sequence[Any], rights: Sequence[Any]) -> list[float]:
    """Return 1 for each right answer, 0 for each wrong one."""
    return [float(answer == right) for answer, right in zip(answers, rights, strict=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledItems:
    """The labelled texts of a head.

    Attributes:
        metric: its name.
        items: inputs with their right answers.
        files: their names.
        scores: the score of each answer, the higher the better.
        combined: the metric in percent; None for the mean of the scores.
    """

    metric: str
    items: list[EngineItem]
    files: Sequence[Path]
    scores: _Scores = _score_equal
    combined: _Metric | None = None

    @property
    def rights(self) -> list[Any]:
        """The right answers of all items."""
        return [right for item in self.items for right in item.rights or ()]

    def percent(self, answers: Sequence[Any]) -> float:
        """Return the metric of the answers to all items, in percent."""
        if self.combined is not None:
            return self.combined(answers, self.rights)
        scores = self.scores(answers, self.rights)
        return 100 * sum(scores) / len(scores)


def tasks_with_data(config: ExportConfig) -> set[TaskName]:
    """Return the tasks that labelled data is given for."""
    texts = config.text_classification or config.task or config.heads
    given: dict[TaskName, object] = {
        CLASSIFICATION: texts,
        "question-answering": config.question_answering,
        "token-classification": config.token_classification,
    }
    return {task for task, data in given.items() if data}


def read_labelled_items(
    config: ExportConfig, source: Source, tokenizer: AlbertTokenizer
) -> dict[str, LabelledItems]:
    """Read the labelled data of each head that has some.

    Raises:
        ExportError: there is data for a head that the checkpoint has not, or none in the files.
        TrainingError: a file cannot be read, or a label is not one of the model's.
    """
    if config.task == RACE:
        raise ExportError("--task RACE is multiple choice, which is not served. Leave it out")
    config = with_task_data(config)
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
    metric, read = _READ[problem]
    items = [
        EngineItem(
            inputs=[EncoderInput(ids=example.ids, types=example.types, task=head, rows=[0])],
            read=read,
            rights=[_right(text.label)],
        )
        for example, text in zip(examples, texts, strict=True)
    ]
    labelled = LabelledItems(metric=metric, items=items, files=files)
    if problem == "regression":
        return replace(labelled, scores=_score_near, combined=_pearson)
    return labelled


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


def _right(label: Label) -> Any:
    """Return a label as `_READ` reads answers."""
    return tuple(np.flatnonzero(label).tolist()) if isinstance(label, tuple) else label


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
    return LabelledItems(
        metric="F1", items=items, files=config.question_answering, scores=_score_f1
    )


def _read_entities(
    config: ExportConfig, source: Source, tokenizer: AlbertTokenizer
) -> LabelledItems:
    texts = read_tagged(config.token_classification)
    names = source.tasks[TOKENS].labels or []
    return LabelledItems(
        metric="entity F1",
        items=list(entity_items(texts, tokenizer, names, length=source.config.max_positions)),
        files=config.token_classification,
        scores=_score_entities,
        combined=_entity_f1,
    )


def _score_f1(answers: Sequence[PredictedAnswer], questions: Sequence[Question]) -> list[float]:
    version = version_of(questions)
    pairs = zip(answers, questions, strict=True)
    return [score_answer(question, answer.text, version).f1 for answer, question in pairs]


def _score_entities(answers: Sequence[Entities], rights: Sequence[Entities]) -> list[float]:
    """Return minus the number of entities that are missed or wrong."""
    return [-float(len(answer ^ right)) for answer, right in zip(answers, rights, strict=True)]


def _entity_f1(answers: Sequence[Entities], rights: Sequence[Entities]) -> float:
    total, _ = entity_figures(list(zip(answers, rights, strict=True)))
    return 100 * total["f1"]


def _score_near(answers: Sequence[float], rights: Sequence[float]) -> list[float]:
    return [-abs(answer - right) for answer, right in zip(answers, rights, strict=True)]


def _pearson(answers: Sequence[float], rights: Sequence[float]) -> float:
    """Return Pearson's correlation, in percent; 0 without one."""
    scores_N1 = np.array(answers)[:, None]
    correlation = metric_figures(("pearson",), scores_N1, np.array(rights, float))["pearson"]
    return 0.0 if math.isnan(correlation) else 100 * correlation


def _read_best(logits: list[Logits]) -> list[int]:
    return [int(logits[0][0].argmax())]


def _read_positive(logits: list[Logits]) -> list[tuple[int, ...]]:
    return [tuple(np.flatnonzero(logits[0][0] > 0).tolist())]


def _read_score(logits: list[Logits]) -> list[float]:
    return [float(logits[0][0, 0])]


# The metric of labelled texts, and the reader of an answer from their logits.
_READ: Final[dict[ProblemType, tuple[str, Callable[[list[Logits]], list[Any]]]]] = {
    "single_label_classification": ("accuracy", _read_best),
    "multi_label_classification": ("subset accuracy", _read_positive),
    "regression": ("Pearson", _read_score),
}
