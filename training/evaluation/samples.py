"""Evaluation samples of each task from real text, and the predictions from its logits.

Predictions are marked by labels where the data has them, elsewhere by those of a reference. Draws
have a fixed seed, so that every model of a vocabulary is asked the same.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np

from albert_serve.api.schemas import Truncation
from albert_serve.bundle.manifest import AGREEMENT, HeadEntry, ProblemType, TaskEntry, heads_of
from albert_serve.bundle.weights import CLASSIFICATION, TOKENS, TaskName, is_task
from albert_serve.config import AlbertConfig
from albert_serve.errors import TextTooLongError
from albert_serve.tasks.base import EncoderInput, Logits
from albert_serve.tasks.question_answering.task import QuestionAnswering
from albert_serve.tasks.truncation import Truncator
from albert_serve.tokenizer import AlbertTokenizer
from training.data.examples import (
    IGNORED,
    MIN_LENGTH,
    Example,
    ExampleSettings,
    SentenceTask,
    build_examples,
)
from training.data.labelled.entities import TaggedText, read_tagged
from training.data.labelled.texts import Label, LabelledText, read_labelled
from training.data.masking import NgramMasking
from training.data.questions import Question, read_squad
from training.data.shards import Shard
from training.errors import EvaluationError
from training.evaluation.glue import read_for_model
from training.evaluation.metrics import metric_figures
from training.evaluation.questions import PredictedAnswer, question_items, question_parameters
from training.evaluation.real_text import RealData, RealText, read_real_text
from training.evaluation.squad import score_answer, version_of
from training.evaluation.tokens import Entities, entity_figures, entity_items
from training.evaluation.torch_engine import EngineItem
from training.model.provenance import file_names

_SEED: Final = 12345

_LENGTH: Final = 128  # to which `albert-serve evaluate` cuts held-out text, too
_MOST_EPOCHS: Final = 8
_MOST_TOKENS: Final = 1 << 17
_CHARACTERS_A_TOKEN: Final = 6
# A short text is repeated until there are this many predictions.
_ENOUGH_MASKS: Final = 1500
_ENOUGH_PAIRS: Final = 1000
_NUM_CHOICES: Final = 4

_logger = logging.getLogger(__name__)

T = TypeVar("T")
_Scores: TypeAlias = Callable[[Sequence[Any], Sequence[Any]], list[float]]
_Mark: TypeAlias = Callable[[Sequence[Any], Sequence[Any]], float]


def _score_equal(predictions: Sequence[Any], rights: Sequence[Any]) -> list[float]:
    """Return 1 for each right prediction, 0 for each wrong one."""
    pairs = zip(predictions, rights, strict=True)
    return [float(prediction == right) for prediction, right in pairs]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """The sample of one task.

    Attributes:
        metric: its name; with `AGREEMENT`, predictions are marked by those of torch.
        files: the names of those that it was drawn from.
        scores: of each prediction by what it is marked by, the higher the better.
        correlation: the figure of predictions, in percent, where it is not the mean of the scores.
    """

    metric: str
    items: list[EngineItem]
    files: list[str]
    scores: _Scores = _score_equal
    correlation: _Mark | None = None

    def mark(self, predictions: Sequence[Any], rights: Sequence[Any]) -> float:
        """Return the figure of predictions, in percent."""
        if self.correlation is not None:
            return self.correlation(predictions, rights)
        scores = self.scores(predictions, rights)
        return 100 * sum(scores) / len(scores)


@dataclass(frozen=True, kw_only=True)
class _Drawing:
    """The source of samples.

    Attributes:
        left_out: texts that were drawn and do not fit the model, by head.
    """

    config: AlbertConfig
    tasks: Mapping[TaskName, TaskEntry]
    tokenizer: AlbertTokenizer
    data: RealData
    left_out: Counter[str] = field(default_factory=Counter)

    @property
    def max_positions(self) -> int:
        """The maximum tokens of an input."""
        return self.config.max_positions

    @cached_property
    def text(self) -> RealText:
        """The text, cut to the amount that samples can need."""
        return read_real_text(self.data.text, _CHARACTERS_A_TOKEN * _MOST_TOKENS)

    @cached_property
    def part(self) -> Shard:
        """The text's tokens."""
        return self.text.tokenize(self.tokenizer)

    def epochs(self, sentence_task: SentenceTask) -> Iterator[list[Example]]:
        """Yield the text as pretraining sequences, with different cuts in each epoch."""
        length = min(_LENGTH, self.max_positions)
        if length < MIN_LENGTH:
            raise EvaluationError(
                f"the model has {length} positions; to be measured on text it needs {MIN_LENGTH}"
            )
        settings = ExampleSettings(length=length, sentence_task=sentence_task)
        for epoch in range(_MOST_EPOCHS):
            examples = build_examples(self.part, settings, seed=_SEED, epoch=epoch)
            rows = zip(examples.bounds.tolist(), examples.labels.tolist(), strict=True)
            yield shuffled(
                Example(0, epoch, number, tuple(bounds), label)
                for number, (bounds, label) in enumerate(rows)
            )

    def gather(
        self, epochs: Iterable[Iterable[EngineItem]], *, enough: int = 0
    ) -> list[EngineItem]:
        """Gather items of epochs until there are enough predictions or the maximum of tokens."""
        items: list[EngineItem] = []
        num_left, num_predictions = _MOST_TOKENS, 0
        for epoch in epochs:
            for item in epoch:
                if item.num_tokens > num_left:
                    return items
                items.append(item)
                num_left -= item.num_tokens
                num_predictions += len(item.rights or ())
            if num_predictions >= enough:
                break
        return items


def shuffled(values: Iterable[T]) -> list[T]:
    """Shuffle the values with a fixed seed."""
    ordered = list(values)
    return [ordered[index] for index in np.random.default_rng(_SEED).permutation(len(ordered))]


def draw_samples(
    config: AlbertConfig,
    tasks: Mapping[TaskName, TaskEntry],
    tokenizer: AlbertTokenizer,
    data: RealData,
) -> dict[str, Sample]:
    """Draw a sample for each head of a checkpoint.

    Texts that do not fit the model are left out; how many is logged.

    Raises:
        EvaluationError: the data has nothing for a task, or something for one that is not there.
        CorpusError: a file cannot be read, or a label is not one of the model's.
    """
    _check_tasks(tasks, data)
    drawing = _Drawing(config=config, tasks=tasks, tokenizer=tokenizer, data=data)
    samples: dict[str, Sample] = {}
    for head in heads_of(tasks):
        sample = _DRAWS[head](drawing) if is_task(head) else _draw_texts(drawing, head)
        if drawing.left_out[head]:
            _logger.warning(
                "%s: texts that are left out, as a model of %d positions cannot be asked: %d",
                *(head, drawing.max_positions, drawing.left_out[head]),
            )
        if not sample.items:
            files = ", ".join(sample.files) or "no file"
            raise EvaluationError(f"{files}: nothing to ask {head}")
        samples[head] = sample
    return samples


def _check_tasks(tasks: Mapping[TaskName, TaskEntry], data: RealData) -> None:
    for task, files in (
        ("text-classification", data.labelled),
        ("question-answering", data.questions),
        (TOKENS, data.tagged),
    ):
        if files and task not in tasks:
            raise EvaluationError(
                f"{files[0]}: the checkpoint has no head for {task}, only for "
                f"{', '.join(tasks)}; leave the file out"
            )
    entry = tasks.get(CLASSIFICATION)
    names = [] if entry is None else [entry.default_head, *entry.heads]
    unknown = [name for name in data.heads if name not in names]
    if unknown:
        raise EvaluationError(
            f"the checkpoint has no classifier {unknown[0]!r}; it has {', '.join(names) or 'none'}"
        )
    if entry is not None and data.labelled and entry.default_head in data.heads:
        raise EvaluationError(
            f"--head {entry.default_head} is the default classifier, whose data stands before "
            "--head already; give one of the two"
        )


def _draw_masks(drawing: _Drawing) -> Sample:
    """Draw texts of one segment, as the service reads them, whose tokens to predict are [MASK]."""
    masking = NgramMasking.of(drawing.tokenizer)
    mask_id = drawing.tokenizer.mask_id

    def items(examples: Iterable[Example]) -> Iterator[EngineItem]:
        for example in examples:
            whole, second = example.tokens(drawing.part)
            _, chosen = masking(whole, example.mask_rng(_SEED))
            masked = whole.copy()
            masked[chosen] = mask_id
            if len(chosen):
                encoder_input = _input("fill-mask", masked.tolist(), second, chosen.tolist())
                yield EngineItem(
                    inputs=[encoder_input], read=_read_best, rights=whole[chosen].tolist()
                )

    drawn = drawing.gather(map(items, drawing.epochs("none")), enough=_ENOUGH_MASKS)
    return Sample(metric="accuracy", items=drawn, files=drawing.text.files)


def _draw_pairs(drawing: _Drawing) -> Sample:
    """Draw pairs of segments, in order or swapped."""

    def items(examples: Iterable[Example]) -> Iterator[EngineItem]:
        for example in examples:
            whole, second = example.tokens(drawing.part)
            if example.label != IGNORED:
                encoder_input = _input("sentence-order", whole.tolist(), second, [0])
                yield EngineItem(inputs=[encoder_input], read=_read_best, rights=[example.label])

    drawn = drawing.gather(map(items, drawing.epochs("sop")), enough=_ENOUGH_PAIRS)
    return Sample(metric="accuracy", items=drawn, files=drawing.text.files)


def _input(task: TaskName, ids: list[int], second: int, rows: list[int]) -> EncoderInput:
    types = [0] * second + [1] * (len(ids) - second)
    return EncoderInput(ids=ids, types=types, task=task, rows=rows)


def _draw_texts(drawing: _Drawing, head: str = CLASSIFICATION) -> Sample:
    """Draw labelled texts of a classifier or, without any, sentences."""
    data = _data_of(drawing, head)
    files = data.labelled
    if not files:
        return _draw_sentences(drawing, head)
    entry = heads_of(drawing.tasks)[head]
    problem = entry.problem_type or "single_label_classification"
    labelled = _read_labelled(data, entry.labels, problem)
    metric, read = _LABELLED[problem]
    # A labelled text is not cut, since its label is the whole's.
    fitting = _fitting(drawing, head, labelled, "error")
    marked = (
        EngineItem(inputs=[encoder_input], read=read, rights=[_right(label)])
        for encoder_input, label in fitting
    )
    sample = Sample(metric=metric, items=drawing.gather([marked]), files=file_names(files))
    if problem == "regression":
        return replace(sample, scores=_score_near, correlation=_pearson)
    return sample


def _draw_sentences(drawing: _Drawing, head: str) -> Sample:
    """Draw sentences for a head without labelled data."""
    entry = heads_of(drawing.tasks)[head]
    texts = [LabelledText(text=s, pair=None, label=IGNORED) for s in drawing.text.sentences]
    inputs = (encoder_input for encoder_input, _ in _fitting(drawing, head, texts, "truncate"))
    items = drawing.gather([_unlabelled(entry, inputs)])
    return Sample(metric=AGREEMENT, items=items, files=drawing.text.files)


def _data_of(drawing: _Drawing, head: str) -> RealData:
    """Return the data of a classifier; the default one may be named or not."""
    _, _, name = head.partition("/")
    if name:
        return drawing.data.heads.get(name, RealData(text=()))
    return drawing.data.heads.get(drawing.tasks[CLASSIFICATION].default_head, drawing.data)


def _read_labelled(
    data: RealData, names: Sequence[str] | None, problem: ProblemType
) -> list[LabelledText]:
    """Read labelled texts, with the numbers of the model's outputs as labels."""
    if data.task is None:
        return read_labelled(data.labelled, names, data.columns, problem)[0]
    return read_for_model(data.task, data.labelled, names or [])


def _fitting(
    drawing: _Drawing, head: str, texts: Sequence[LabelledText], truncation: Truncation
) -> Iterator[tuple[EncoderInput, Label]]:
    """Yield texts, shuffled, with their labels."""
    truncator = Truncator(drawing.tokenizer, drawing.max_positions, truncation)
    for text in shuffled(texts):
        try:
            fitted = truncator.fit_texts(text.text, text.pair)
        except TextTooLongError:
            drawing.left_out[head] += 1
        else:
            yield fitted.at_cls(head), text.label


def _right(label: Label) -> Any:
    """Return a label as `_LABELLED` reads predictions."""
    return tuple(np.flatnonzero(label).tolist()) if isinstance(label, tuple) else label


def _unlabelled(entry: HeadEntry, inputs: Iterator[EncoderInput]) -> Iterator[EngineItem]:
    if entry.num_outputs == 1:  # a number, of which some texts have a higher one than others
        while len(few := list(islice(inputs, _NUM_CHOICES))) > 1:
            yield EngineItem(inputs=few, read=_read_highest)
        return
    is_multi_label = entry.problem_type == "multi_label_classification"
    for given in inputs:
        yield EngineItem(inputs=[given], read=_read_positive if is_multi_label else _read_best)


def _draw_questions(drawing: _Drawing) -> Sample:
    """Draw questions or, without any, the first sentences of paragraphs."""
    files = drawing.data.questions
    if not files:
        made = [
            Question(id="", question=each[0], context=" ".join(each), answers=(), start=None)
            for each in drawing.text.paragraphs
            if len(each) > 1
        ]
        items = (replace(item, rights=None) for item in _questions(drawing, made, False))
        return Sample(metric=AGREEMENT, items=drawing.gather([items]), files=drawing.text.files)
    questions = read_squad(files)
    some_have_none = any(question.start is None for question in questions)
    return Sample(
        metric="F1",
        items=drawing.gather([_questions(drawing, questions, some_have_none)]),
        files=file_names(files),
        scores=_score_f1,
    )


def _questions(
    drawing: _Drawing, questions: Sequence[Question], may_be_empty: bool
) -> Iterator[EngineItem]:
    entry = drawing.tasks["question-answering"]
    task = QuestionAnswering(
        tokenizer=drawing.tokenizer,
        max_positions=drawing.max_positions,
        null_score_diff_threshold=entry.null_score_diff_threshold,
    )
    parameters = question_parameters(drawing.max_positions, may_be_empty=may_be_empty)
    for item in question_items(task, shuffled(questions), parameters):
        if item is None:
            drawing.left_out["question-answering"] += 1
        else:
            yield item


def _score_f1(answers: Sequence[PredictedAnswer], questions: Sequence[Question]) -> list[float]:
    version = version_of(questions)
    pairs = zip(answers, questions, strict=True)
    return [score_answer(each, answer.text, version).f1 for answer, each in pairs]


def _draw_entities(drawing: _Drawing) -> Sample:
    """Draw texts with entities; without any, sentences, with torch's entities."""
    files, names = drawing.data.tagged, drawing.tasks[TOKENS].labels or []
    if files:
        texts = read_tagged(files)
    else:
        texts = [TaggedText(text=sentence, entities=()) for sentence in drawing.text.sentences]
    items = entity_items(shuffled(texts), drawing.tokenizer, names, length=drawing.max_positions)
    if not files:
        unmarked = drawing.gather([(replace(item, rights=None) for item in items)])
        return Sample(metric=AGREEMENT, items=unmarked, files=drawing.text.files)
    return Sample(
        metric="entity F1",
        items=drawing.gather([items]),
        files=file_names(files),
        scores=_score_entities,
        correlation=_entity_f1,
    )


def _score_entities(predictions: Sequence[Entities], rights: Sequence[Entities]) -> list[float]:
    """Return minus the number of entities that are missed or are none."""
    return [-float(len(one ^ other)) for one, other in zip(predictions, rights, strict=True)]


def _entity_f1(predictions: Sequence[Entities], rights: Sequence[Entities]) -> float:
    whole, _ = entity_figures(list(zip(predictions, rights, strict=True)))
    return 100 * whole["f1"]


def _read_best(logits: list[Logits]) -> list[int]:
    best: list[int] = logits[0].argmax(axis=1).tolist()
    return best


def _read_positive(logits: list[Logits]) -> list[tuple[int, ...]]:
    return [tuple(np.flatnonzero(row > 0).tolist()) for row in logits[0]]


def _read_highest(logits: list[Logits]) -> list[int]:
    return [int(np.argmax([each[0, 0] for each in logits]))]


def _read_score(logits: list[Logits]) -> list[float]:
    return [float(logits[0][0, 0])]


def _score_near(predictions: Sequence[float], rights: Sequence[float]) -> list[float]:
    return [-abs(each - right) for each, right in zip(predictions, rights, strict=True)]


def _pearson(predictions: Sequence[float], rights: Sequence[float]) -> float:
    """Return Pearson's correlation, in percent; 0 without one."""
    scores_N1 = np.array(predictions)[:, None]
    correlation = metric_figures(("pearson",), scores_N1, np.array(rights, float))["pearson"]
    return 0.0 if math.isnan(correlation) else 100 * correlation


# The metric of labelled texts, and how their logits are read.
_LABELLED: Final[dict[ProblemType, tuple[str, Callable[[list[Logits]], list[Any]]]]] = {
    "single_label_classification": ("accuracy", _read_best),
    "multi_label_classification": ("subset accuracy", _read_positive),
    "regression": ("Pearson", _read_score),
}
# The function that draws each task's sample.
_DRAWS: Final[dict[TaskName, Callable[[_Drawing], Sample]]] = {
    "fill-mask": _draw_masks,
    "sentence-order": _draw_pairs,
    "text-classification": _draw_texts,
    "question-answering": _draw_questions,
    "token-classification": _draw_entities,
}
