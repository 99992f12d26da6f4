"""Predictions of a model on items of its tasks, whatever runs it: torch or a bundle's engine.

The engine in torch is that of evaluation, and the reference for a bundle's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Final, NamedTuple

import torch
from pydantic import ValidationError
from tqdm import tqdm

from albert_serve.api.schemas import (
    Answer,
    QuestionAnsweringParameters,
    QuestionContext,
    describe,
)
from albert_serve.errors import InvalidInputError
from albert_serve.progress import progress_bar
from albert_serve.tasks.base import EncoderInput, Logits, Runner
from albert_serve.tasks.grouping import group_by_length
from albert_serve.tasks.question_answering.decoder import SpanDecoder
from albert_serve.tasks.question_answering.task import QuestionAnswering
from training.data.batch import pad
from training.data.questions import Question
from training.errors import TrainingError
from training.model.heads import AlbertForTasks

# The limits of the original's run_squad, in tokens.
MAX_ANSWER_LENGTH: Final = 30
_MAX_QUESTION_LENGTH: Final = 64
_TOKENS_A_BATCH: Final = 8192
_TOKENS_AT_ONCE: Final = 8 * _TOKENS_A_BATCH


class EvaluationError(TrainingError):
    """Data that a checkpoint cannot be evaluated on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """Inputs that are scored together.

    Attributes:
        read: the predictions that its logits are, one (R, K) array an input.
        rights: what they are marked by, one for each; None where that is not known.
    """

    inputs: list[EncoderInput]
    read: Callable[[list[Logits]], list[Any]]
    rights: list[Any] | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens over all inputs."""
        return sum(len(encoded.ids) for encoded in self.inputs)


def predict(
    runner: Runner, items: Sequence[Item], *, max_tokens_at_once: int, title: str
) -> list[Any]:
    """Return the predictions of all items, in order; those of like lengths run together.

    Args:
        max_tokens_at_once: tokens whose logits are held in memory together.
        title: of the progress bar.

    Raises:
        EngineError: the runner failed.
    """
    num_tokens = sum(item.num_tokens for item in items)
    with progress_bar(title=title, total=num_tokens, unit="tokens", unit_scale=True) as bar:
        return predict_part(runner, items, max_tokens_at_once=max_tokens_at_once, bar=bar)


def predict_part(
    runner: Runner, items: Sequence[Item], *, max_tokens_at_once: int, bar: tqdm[Any]
) -> list[Any]:
    """Return the predictions of some of the items that a bar of tokens shows; see `predict`."""
    lengths = [item.num_tokens for item in items]
    predictions: list[list[Any]] = [[]] * len(items)
    for indices in group_by_length(lengths, max_tokens_at_once):
        chunk = [items[index] for index in indices]
        logits = iter(runner.run([encoded for item in chunk for encoded in item.inputs]))
        for index, item in zip(indices, chunk, strict=True):
            predictions[index] = item.read(list(islice(logits, len(item.inputs))))
        bar.update(sum(item.num_tokens for item in chunk))
    return [prediction for each in predictions for prediction in each]


class PredictedAnswer(NamedTuple):
    """An answer's position in the context, and its text."""

    start: int
    end: int
    text: str


def read_answer(decoder: SpanDecoder, logits: list[Logits]) -> list[PredictedAnswer]:
    """Return the answer of the service."""
    answer = decoder.finish(logits)
    assert isinstance(answer, Answer)
    return [PredictedAnswer(answer.start, answer.end, answer.answer)]


def question_parameters(
    max_positions: int,
    *,
    may_be_empty: bool,
    max_answer_length: int = MAX_ANSWER_LENGTH,
    length: int | None = None,
) -> QuestionAnsweringParameters:
    """Return the parameters of the requests by which questions are asked.

    Args:
        max_positions: of the model.
        may_be_empty: whether no answer is one.
        max_answer_length: tokens of the longest answer.
        length: maximum tokens of a question with a window of its context; None for the service's.

    Raises:
        EvaluationError: a length is over that of a request.
    """
    try:
        return QuestionAnsweringParameters(
            handle_impossible_answer=may_be_empty,
            max_answer_len=max_answer_length,
            max_question_len=min(_MAX_QUESTION_LENGTH, (length or max_positions) // 2),
            max_seq_len=length,
        )
    except ValidationError as error:
        raise EvaluationError(describe(error)) from error


def question_items(
    task: QuestionAnswering,
    questions: Iterable[Question],
    *,
    may_be_empty: bool,
    max_answer_length: int = MAX_ANSWER_LENGTH,
    length: int | None = None,
    read: Callable[[SpanDecoder, list[Logits]], list[Any]] = read_answer,
) -> Iterator[Item | None]:
    """Yield the item of each question; None where it cannot be asked.

    Args:
        may_be_empty, max_answer_length, length: as in `question_parameters`.
        read: the prediction from the logits of a question's windows.

    Raises:
        EvaluationError: as `question_parameters`.
    """
    parameters = question_parameters(
        task.max_positions,
        may_be_empty=may_be_empty,
        max_answer_length=max_answer_length,
        length=length,
    )
    for question in questions:
        try:
            item = QuestionContext(question=question.question, context=question.context)
            asked = task.ask(item, parameters)
        except (InvalidInputError, ValidationError):
            yield None
        else:
            yield Item(inputs=asked.inputs, read=partial(read, asked.decoder), rights=[question])


class TorchEngine:
    """Counterpart of `albert_serve.runtime.engine.Engine` on a model in memory, in fp32.

    Inputs are sorted by length into batches of at most `max_batch_tokens` tokens.
    """

    def __init__(self, model: AlbertForTasks, *, max_batch_tokens: int = _TOKENS_A_BATCH) -> None:
        self.max_batch_tokens = max_batch_tokens
        self._model = model.eval()
        self._device = next(model.parameters()).device

    @torch.inference_mode()
    def run(self, inputs: Sequence[EncoderInput]) -> list[Logits]:
        """Return the logits (R, K) of each input, in their order."""
        results: dict[int, Logits] = {}
        for batch in group_by_length([len(item.ids) for item in inputs], self.max_batch_tokens):
            results |= self._run_batch({index: inputs[index] for index in batch})
        return [results[index] for index in range(len(inputs))]

    def _run_batch(self, batch: dict[int, EncoderInput]) -> dict[int, Logits]:
        padded = pad([(encoded.ids, encoded.types) for encoded in batch.values()])
        hidden_BSH = self._model(padded.to(self._device))
        results: dict[int, Logits] = {}
        for (index, encoded), hidden_SH in zip(batch.items(), hidden_BSH, strict=True):
            rows = list(range(len(encoded.ids))) if encoded.rows is None else encoded.rows
            logits_RK = self._model.logits(encoded.task, hidden_SH[rows])
            results[index] = logits_RK.float().cpu().numpy()
        return results


def predict_in_torch(model: AlbertForTasks, items: Sequence[Item], title: str) -> list[Any]:
    """Return the predictions of all items, in order.

    Args:
        title: of the progress bar.
    """
    engine = TorchEngine(model)
    return predict(engine, items, max_tokens_at_once=_TOKENS_AT_ONCE, title=title)
