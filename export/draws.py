"""Evaluation samples of each task from real text, and the predictions from its logits.

Predictions are marked by labels where the data has them, elsewhere by those of torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice, pairwise
from typing import Final, NamedTuple

import numpy as np
from pydantic import ValidationError

from albert_serve.api.schemas import (
    Answer,
    QuestionAnsweringAnswer,
    QuestionAnsweringParameters,
    QuestionContext,
    Truncation,
)
from albert_serve.bundle.manifest import TaskEntry
from albert_serve.bundle.weights import TaskName
from albert_serve.errors import InvalidInputError, TextTooLongError
from albert_serve.tasks.base import EncoderInput, Logits, Prepared
from albert_serve.tasks.fitting import fit
from albert_serve.tasks.question_answering.task import QuestionAnswering
from albert_serve.tokenizer import AlbertTokenizer
from export.errors import ExportError
from export.real_text import RealData
from export.samples import AGREEMENT, SEED, Drawing, Item, Sample, shuffled
from export.source import Source
from training.data.datasets import LabelledText, Question, read_labelled, read_squad
from training.data.examples import IGNORED, Example
from training.data.masking import NgramMasking, word_starts
from training.evaluation.squad import evaluate_answers

# A short text is repeated until there are this many predictions.
_ENOUGH_MASKS: Final = 1500
_ENOUGH_PAIRS: Final = 1000
_NUM_CHOICES: Final = 4

_logger = logging.getLogger(__name__)


class _Asked(NamedTuple):
    """A question on a context, and its labelled answers if there are any."""

    question: str
    context: str
    rights: list[Question] | None = None


class _Found(NamedTuple):
    """An answer's position in the context, and its text."""

    start: int
    end: int
    text: str


def draw_samples(
    source: Source, tokenizer: AlbertTokenizer, data: RealData
) -> dict[TaskName, Sample]:
    """Draw a sample for each task of a checkpoint; smaller for a larger model.

    Texts that do not fit the model are left out; how many is logged.

    Raises:
        ExportError: the data has nothing for a task, or something for one that is not there.
        CorpusError: a file cannot be read, or a label is not one of the model's.
    """
    _check_tasks(source, data)
    drawing = Drawing(source=source, tokenizer=tokenizer, data=data)
    samples: dict[TaskName, Sample] = {}
    for task in source.tasks:
        draw, needs = _DRAWS[task]
        sample = draw(drawing)
        if drawing.left_out[task]:
            _logger.warning(
                "%s: texts that are left out, as a model of %d positions cannot be asked: %d",
                *(task, drawing.max_positions, drawing.left_out[task]),
            )
        if not sample.items:
            files = ", ".join(sample.files) or "no file"
            raise ExportError(f"{files}: nothing to ask {task}; that takes {needs}")
        samples[task] = sample
    return samples


def _check_tasks(source: Source, data: RealData) -> None:
    for task, files in (
        ("text-classification", data.labelled),
        ("question-answering", data.questions),
    ):
        if files and task not in source.tasks:
            raise ExportError(
                f"{files[0]}: the checkpoint has no head for {task}, only for "
                f"{', '.join(source.tasks)}; leave the file out"
            )


def _draw_masks(drawing: Drawing) -> Sample:
    """Draw pretraining sequences in which all tokens to predict are [MASK]."""
    masking = NgramMasking(word_starts=word_starts(drawing.tokenizer))
    mask_id = drawing.tokenizer.mask_id

    def items(examples: Iterable[Example]) -> Iterator[Item]:
        for example in examples:
            whole, second = example.tokens(drawing.part)
            _, chosen = masking(whole, example.mask_rng(SEED))
            masked = whole.copy()
            masked[chosen] = mask_id
            if len(chosen):
                given = _input("fill-mask", masked.tolist(), second, chosen.tolist())
                yield Item(inputs=[given], read=_read_best, rights=whole[chosen].tolist())

    found = drawing.gather(map(items, drawing.epochs()), enough=_ENOUGH_MASKS)
    return Sample(metric="accuracy", items=found, files=drawing.text.files)


def _draw_pairs(drawing: Drawing) -> Sample:
    """Draw pairs of segments, in order or swapped."""

    def items(examples: Iterable[Example]) -> Iterator[Item]:
        for example in examples:
            whole, second = example.tokens(drawing.part)
            if example.label != IGNORED:
                given = _input("sentence-order", whole.tolist(), second, [0])
                yield Item(inputs=[given], read=_read_best, rights=[example.label])

    found = drawing.gather(map(items, drawing.epochs()), enough=_ENOUGH_PAIRS)
    return Sample(metric="accuracy", items=found, files=drawing.text.files)


def _input(task: TaskName, ids: list[int], second: int, rows: list[int]) -> EncoderInput:
    types = [0] * second + [1] * (len(ids) - second)
    return EncoderInput(ids=ids, types=types, task=task, rows=rows)


def _draw_texts(drawing: Drawing) -> Sample:
    """Draw labelled texts or, without any, sentences."""
    entry = drawing.source.tasks["text-classification"]
    has_one_label = entry.problem_type == "single_label_classification" and entry.num_outputs > 1
    files = drawing.data.labelled
    if files:
        texts, _ = read_labelled(files, entry.labels if has_one_label else None)
    else:
        texts = [LabelledText(text=s, pair=None, label=IGNORED) for s in drawing.text.sentences]
    items = _classified(entry, _fitting(drawing, shuffled(texts)))
    return Sample(
        metric="accuracy" if files and has_one_label else AGREEMENT,
        items=drawing.gather([items]),
        files=[file.name for file in files] or drawing.text.files,
    )


def _fitting(
    drawing: Drawing, texts: Iterable[LabelledText]
) -> Iterator[tuple[EncoderInput, list[int] | None]]:
    """Yield texts with their labels. A labelled text is not cut, since its label is the whole's."""
    for text in texts:
        is_labelled = text.label != IGNORED
        try:
            given = _fit(
                drawing,
                "text-classification",
                (text.text, text.pair),
                "error" if is_labelled else "truncate",
            )
        except TextTooLongError:
            drawing.left_out["text-classification"] += 1
        else:
            yield given, [text.label] if is_labelled else None


def _classified(
    entry: TaskEntry, inputs: Iterator[tuple[EncoderInput, list[int] | None]]
) -> Iterator[Item]:
    if entry.num_outputs == 1:  # a number, of which some texts have a higher one than others
        while len(few := list(islice(inputs, _NUM_CHOICES))) > 1:
            yield Item(inputs=[given for given, _ in few], read=_read_highest)
        return
    is_multi_label = entry.problem_type == "multi_label_classification"
    for given, rights in inputs:
        yield Item(
            inputs=[given], read=_read_positive if is_multi_label else _read_best, rights=rights
        )


def _draw_questions(drawing: Drawing) -> Sample:
    """Draw questions or, without any, the first sentences of paragraphs."""
    files = drawing.data.questions
    if not files:
        paragraphs = [each for each in drawing.text.paragraphs if len(each.sentences) > 1]
        made = [_Asked(each.sentences[0], each.text) for each in shuffled(paragraphs)]
        items = _questions(drawing, made, QuestionAnsweringParameters(truncation="truncate"))
        return Sample(metric=AGREEMENT, items=drawing.gather([items]), files=drawing.text.files)
    questions = read_squad(files)
    parameters = QuestionAnsweringParameters(
        handle_impossible_answer=any(question.start is None for question in questions),
        truncation="truncate",
    )
    asked = [_Asked(each.question, each.context, [each]) for each in shuffled(questions)]
    return Sample(
        metric="F1",
        items=drawing.gather([_questions(drawing, asked, parameters)]),
        files=[file.name for file in files],
        mark=_mean_f1,
    )


def _questions(
    drawing: Drawing, asked: Iterable[_Asked], parameters: QuestionAnsweringParameters
) -> Iterator[Item]:
    task = QuestionAnswering(tokenizer=drawing.tokenizer, max_positions=drawing.max_positions)
    for question, context, rights in asked:
        try:
            item = QuestionContext(question=question, context=context)
            prepared = task.prepare(item, parameters)
        except (InvalidInputError, ValidationError):
            drawing.left_out["question-answering"] += 1
        else:
            read = partial(_read_answer, prepared)
            yield Item(inputs=prepared.inputs, read=read, rights=rights)


def _mean_f1(answers: Sequence[_Found], questions: Sequence[Question]) -> float:
    figures = [
        evaluate_answers([question], {question.id: answer.text})[1]
        for answer, question in zip(answers, questions, strict=True)
    ]
    return sum(figures) / len(figures)


def _draw_choices(drawing: Drawing) -> Sample:
    """Draw sentences, with the next sentence and random ones as choices."""
    rng = np.random.default_rng(SEED)
    sentences = drawing.text.sentences
    pairs = [pair for each in drawing.text.paragraphs for pair in pairwise(each.sentences)]

    def items() -> Iterator[Item]:
        for first, second in shuffled(pairs):
            others = rng.integers(len(sentences), size=_NUM_CHOICES - 1)
            choices = [second, *(sentences[index] for index in others)]
            inputs = [
                _fit(drawing, "multiple-choice", (first, each), "truncate") for each in choices
            ]
            yield Item(inputs=inputs, read=_read_highest)

    return Sample(metric=AGREEMENT, items=drawing.gather([items()]), files=drawing.text.files)


def _fit(
    drawing: Drawing, task: TaskName, texts: tuple[str, str | None], truncation: Truncation
) -> EncoderInput:
    positions = drawing.max_positions
    fitted = fit(drawing.tokenizer, *texts, max_positions=positions, truncation=truncation)
    return fitted.at_cls(task)


def _read_best(logits: list[Logits]) -> list[int]:
    best: list[int] = logits[0].argmax(axis=1).tolist()
    return best


def _read_positive(logits: list[Logits]) -> list[tuple[int, ...]]:
    return [tuple(np.flatnonzero(row > 0).tolist()) for row in logits[0]]


def _read_highest(logits: list[Logits]) -> list[int]:
    return [int(np.argmax([each[0, 0] for each in logits]))]


def _read_answer(prepared: Prepared[QuestionAnsweringAnswer], logits: list[Logits]) -> list[_Found]:
    answer = prepared.finish(logits)
    assert isinstance(answer, Answer)
    return [_Found(answer.start, answer.end, answer.answer)]


# The function that draws each task's sample.
_DRAWS: Final[dict[TaskName, tuple[Callable[[Drawing], Sample], str]]] = {
    "fill-mask": (_draw_masks, "text in words that the vocabulary has"),
    "sentence-order": (_draw_pairs, "documents of two sentences or more"),
    "text-classification": (_draw_texts, "texts that fit the model's positions"),
    "question-answering": (_draw_questions, "questions, or paragraphs of two sentences or more"),
    "multiple-choice": (_draw_choices, "paragraphs of two sentences or more"),
}
