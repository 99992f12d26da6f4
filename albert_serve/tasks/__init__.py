"""The tasks by the names of their endpoints, and what the service and batch scoring do with any."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from albert_serve.errors import InvalidInputError, NotFoundError, TooMuchAtOnceError
from albert_serve.schemas import (
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
from albert_serve.tasks.base import EncoderInput, Logits, Prepared, Round, Task
from albert_serve.tasks.fill_mask import FillMask
from albert_serve.tasks.question_answering import QuestionAnswering
from albert_serve.tasks.rounds import Work
from albert_serve.tasks.sentence_order import SentenceOrder
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


def prepare_request(task: AnyTask, request: TaskRequest) -> list[Prepared[Any]]:
    """Every item of a request, made ready for the engine.

    Raises:
        InvalidInputError: an item cannot be answered; of several items, the message says which.
        TooMuchAtOnceError: the masks of all items together are more than are read at once.
    """
    prepared = _prepare_items(task, request)
    num_masks = sum(item.num_wide_rows for item in prepared)
    if num_masks > MAX_MASKS:
        raise TooMuchAtOnceError(
            f"the vocabulary would be read at {num_masks} masks; at most {MAX_MASKS} are read at "
            "once: send fewer texts, masks or targets"
        )
    return prepared


def _prepare_items(task: AnyTask, request: TaskRequest) -> list[Prepared[Any]]:
    if not isinstance(request.inputs, list):
        return [task.prepare(request.inputs, request.parameters)]
    prepared = []
    for number, item in enumerate(request.inputs):
        try:
            prepared.append(task.prepare(item, request.parameters))
        except InvalidInputError as error:
            raise type(error)(f"inputs[{number}]: {error}") from error
    return prepared


def shape_reply(request: TaskRequest, answers: Sequence[Any]) -> Any:
    """The reply in Hugging Face's shape, from one answer an item.

    One item is answered without a list around it; but text classification always answers a list
    of lists, because Hugging Face's clients take the first element of what they get.
    """
    if isinstance(request.inputs, list) or isinstance(request, TextClassificationRequest):
        return list(answers)
    return answers[0]
