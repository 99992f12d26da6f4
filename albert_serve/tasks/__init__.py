"""The tasks by the names of their endpoints, and what the service and batch scoring do with any."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from albert_serve.api.schemas import (
    MAX_MASKS,
    FillMaskParameters,
    FillMaskRequest,
    Parameters,
    ProblemType,
    QuestionAnsweringParameters,
    QuestionAnsweringRequest,
    SentenceOrderParameters,
    SentenceOrderRequest,
    TaskRequest,
    TextClassificationParameters,
    TextClassificationRequest,
)
from albert_serve.errors import InvalidInputError, NotFoundError, TooMuchAtOnceError
from albert_serve.tasks.base import EncoderInput, Logits, Prepared, Round, Task
from albert_serve.tasks.fill_mask.task import FillMask
from albert_serve.tasks.question_answering.task import QuestionAnswering
from albert_serve.tasks.rounds import Work
from albert_serve.tasks.sentence_order.task import SentenceOrder
from albert_serve.tasks.text_classification import TextClassification
from albert_serve.tokenizer import AlbertTokenizer

__all__ = [
    "TASKS",
    "AnyTask",
    "EncoderInput",
    "Endpoint",
    "FillMask",
    "Logits",
    "Prepared",
    "QuestionAnswering",
    "Round",
    "SentenceOrder",
    "Task",
    "TaskSetup",
    "TextClassification",
    "Work",
    "open_task",
    "prepare_request",
    "shape_reply",
]

# Of all items of a request together, where no less is asked for.
MAX_TOKENS: Final = 1 << 20
MAX_HELD_BYTES: Final = 1 << 26

# A task of which the caller knows the name only, and so not the types.
AnyTask: TypeAlias = Task[Any, Any, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSetup:
    """What a task needs to know of the model.

    Attributes:
        labels: names of the head's outputs, in order; for text classification.
        problem_type: Hugging Face's, for text classification; None decides by the labels.
    """

    tokenizer: AlbertTokenizer
    max_positions: int
    labels: Sequence[str] = ()
    problem_type: ProblemType | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """What answers under a task's name.

    Attributes:
        request: the contract of a request.
        parameters: the contract of its parameters.
        open: makes the task for a model.
    """

    request: type[TaskRequest]
    parameters: type[Parameters]
    open: Callable[[TaskSetup], AnyTask]


def _open_fill_mask(setup: TaskSetup) -> FillMask:
    return FillMask(tokenizer=setup.tokenizer, max_positions=setup.max_positions)


def _open_text_classification(setup: TaskSetup) -> TextClassification:
    return TextClassification(
        tokenizer=setup.tokenizer,
        max_positions=setup.max_positions,
        labels=setup.labels,
        problem_type=setup.problem_type,
    )


def _open_question_answering(setup: TaskSetup) -> QuestionAnswering:
    return QuestionAnswering(tokenizer=setup.tokenizer, max_positions=setup.max_positions)


def _open_sentence_order(setup: TaskSetup) -> SentenceOrder:
    return SentenceOrder(tokenizer=setup.tokenizer, max_positions=setup.max_positions)


TASKS: Final[dict[str, Endpoint]] = {
    "fill-mask": Endpoint(
        request=FillMaskRequest,
        parameters=FillMaskParameters,
        open=_open_fill_mask,
    ),
    "text-classification": Endpoint(
        request=TextClassificationRequest,
        parameters=TextClassificationParameters,
        open=_open_text_classification,
    ),
    "question-answering": Endpoint(
        request=QuestionAnsweringRequest,
        parameters=QuestionAnsweringParameters,
        open=_open_question_answering,
    ),
    "sentence-order": Endpoint(
        request=SentenceOrderRequest,
        parameters=SentenceOrderParameters,
        open=_open_sentence_order,
    ),
}


def open_task(name: str, setup: TaskSetup) -> AnyTask:
    """The task of that name for a model.

    Raises:
        NotFoundError: there is no such task.
    """
    if name not in TASKS:
        raise NotFoundError(f"no task {name!r}; there are {', '.join(TASKS)}")
    return TASKS[name].open(setup)


def prepare_request(
    task: AnyTask, request: TaskRequest, *, max_tokens: int = MAX_TOKENS
) -> list[Prepared[Any]]:
    """Every item of a request, made ready for the engine.

    Args:
        max_tokens: the most that all items together may have.

    Raises:
        InvalidInputError: an item cannot be answered; of several items, the message says which.
        TooMuchAtOnceError: all items together have more tokens or masks than are read at once, or
            longer answers than are held.
    """
    amount = _Amount(max_tokens)
    if not isinstance(request.inputs, list):
        only = task.prepare(request.inputs, request.parameters)
        amount.add(only)
        return [only]
    prepared = []
    for number, item in enumerate(request.inputs):
        try:
            prepared.append(task.prepare(item, request.parameters))
        except InvalidInputError as error:
            raise type(error)(f"inputs[{number}]: {error}") from error
        # Item by item: to prepare them all takes hours where each is as large as it may be.
        amount.add(prepared[-1])
    return prepared


class _Amount:
    """What the items of a request come to so far."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = self._num_masks = self._num_held_bytes = 0

    def add(self, item: Prepared[Any]) -> None:
        """Count an item in.

        Raises:
            TooMuchAtOnceError: with it there are too many tokens or masks, or too long answers.
        """
        self._num_tokens += max(item.num_tokens, item.num_round_tokens)
        self._num_masks += item.num_wide_rows
        self._num_held_bytes += item.num_held_bytes
        if self._num_tokens > self._max_tokens:
            raise TooMuchAtOnceError(
                f"the request has over {self._max_tokens} tokens, which is the most that is read "
                "at once: split it"
            )
        if self._num_masks > MAX_MASKS:
            raise TooMuchAtOnceError(
                f"the vocabulary would be read at {self._num_masks} masks or more; at most "
                f"{MAX_MASKS} are read at once: send fewer texts, masks or targets"
            )
        if self._num_held_bytes > MAX_HELD_BYTES:
            raise TooMuchAtOnceError(
                f"the answers would take over {MAX_HELD_BYTES} bytes: send fewer inputs, or lower "
                "top_k"
            )


def shape_reply(request: TaskRequest, answers: Sequence[Any]) -> Any:
    """The reply in Hugging Face's shape, from one answer an item.

    One item is answered without a list around it; but text classification always answers a list
    of lists, because Hugging Face's clients take the first element of what they get.
    """
    if isinstance(request.inputs, list) or isinstance(request, TextClassificationRequest):
        return list(answers)
    return answers[0]
