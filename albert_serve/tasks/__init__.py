"""The tasks by endpoint name, and their common functions for the service and batch scoring."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

from albert_serve.api.embeddings import (
    FEATURE_EXTRACTION,
    FeatureExtractionParameters,
    FeatureExtractionRequest,
)
from albert_serve.api.schemas import (
    MAX_MASKS,
    FillMaskParameters,
    FillMaskRequest,
    MultipleChoiceParameters,
    MultipleChoiceRequest,
    ProblemType,
    QuestionAnsweringParameters,
    QuestionAnsweringRequest,
    SentenceOrderParameters,
    SentenceOrderRequest,
    TaskRequest,
    TextClassificationParameters,
    TextClassificationRequest,
)
from albert_serve.api.wire import Parameters
from albert_serve.bundle.manifest import DEFAULT_HEAD, AdaptiveDepth, HeadEntry
from albert_serve.bundle.weights import QuestionHead, further_head
from albert_serve.errors import InvalidInputError, NotFoundError, TooMuchAtOnceError
from albert_serve.tasks.base import EncoderInput, Logits, Prepared, Round, Task
from albert_serve.tasks.feature_extraction import FeatureExtraction
from albert_serve.tasks.fill_mask.task import FillMask
from albert_serve.tasks.multiple_choice import MultipleChoice
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
    "FeatureExtraction",
    "FillMask",
    "Logits",
    "MultipleChoice",
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
    "read_cuts",
    "shape_reply",
]

# The default limits of all items of a request together.
MAX_TOKENS: Final = 1 << 20
MAX_HELD_BYTES: Final = 1 << 26

# A task whose types the caller does not know.
AnyTask: TypeAlias = Task[Any, Any, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSetup:
    """The properties of the model that a task needs.

    Attributes:
        labels: names of the head's outputs, in order; for text classification.
        problem_type: Hugging Face's, for text classification; None decides by the labels.
        head: the name of text classification's default head.
        heads: the labels and problem types of its further heads by name.
        null_score_diff_threshold: of question answering.
        adaptive_depth: of text classification by a model that can answer after each layer.
        stops_early: whether the engine can answer a text before the last layer.
        question_head: of question answering.
    """

    tokenizer: AlbertTokenizer
    max_positions: int
    hidden_size: int
    num_layers: int
    labels: Sequence[str] = ()
    problem_type: ProblemType | None = None
    head: str = DEFAULT_HEAD
    heads: Mapping[str, HeadEntry] = field(default_factory=dict)
    null_score_diff_threshold: float = 0.0
    adaptive_depth: AdaptiveDepth | None = None
    stops_early: bool = True
    question_head: QuestionHead = "independent"


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """The endpoint of a task.

    Attributes:
        request: the schema of a request.
        parameters: the schema of its parameters.
        open: makes the task for a model.
    """

    request: type[TaskRequest]
    parameters: type[Parameters]
    open: Callable[[TaskSetup], AnyTask]


def _open_fill_mask(setup: TaskSetup) -> FillMask:
    return FillMask(tokenizer=setup.tokenizer, max_positions=setup.max_positions)


def _open_text_classification(setup: TaskSetup) -> TextClassification:
    default = TextClassification(
        tokenizer=setup.tokenizer,
        max_positions=setup.max_positions,
        labels=setup.labels,
        problem_type=setup.problem_type,
        num_layers=setup.num_layers,
        adaptive_depth=setup.adaptive_depth,
        name=setup.head,
        stops_early=setup.stops_early,
    )
    others = {
        name: replace(
            default,
            labels=label_names(entry),
            problem_type=entry.problem_type,
            adaptive_depth=None,
            task=further_head(name),
            name=name,
        )
        for name, entry in setup.heads.items()
    }
    return replace(default, others=others)


def label_names(entry: HeadEntry) -> list[str]:
    """Return the names of a classifier's labels, or LABEL_0 and so on, as `transformers`."""
    return entry.labels or [f"LABEL_{index}" for index in range(entry.num_outputs)]


def _open_question_answering(setup: TaskSetup) -> QuestionAnswering:
    return QuestionAnswering(
        tokenizer=setup.tokenizer,
        max_positions=setup.max_positions,
        null_score_diff_threshold=setup.null_score_diff_threshold,
        head=setup.question_head,
    )


def _open_sentence_order(setup: TaskSetup) -> SentenceOrder:
    return SentenceOrder(tokenizer=setup.tokenizer, max_positions=setup.max_positions)


def _open_multiple_choice(setup: TaskSetup) -> MultipleChoice:
    return MultipleChoice(tokenizer=setup.tokenizer, max_positions=setup.max_positions)


def _open_feature_extraction(setup: TaskSetup) -> FeatureExtraction:
    return FeatureExtraction(
        tokenizer=setup.tokenizer,
        max_positions=setup.max_positions,
        hidden_size=setup.hidden_size,
    )


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
    "multiple-choice": Endpoint(
        request=MultipleChoiceRequest,
        parameters=MultipleChoiceParameters,
        open=_open_multiple_choice,
    ),
    FEATURE_EXTRACTION: Endpoint(
        request=FeatureExtractionRequest,
        parameters=FeatureExtractionParameters,
        open=_open_feature_extraction,
    ),
}


def open_task(name: str, setup: TaskSetup) -> AnyTask:
    """Return the task of that name for a model.

    Raises:
        NotFoundError: there is no such task.
    """
    if name not in TASKS:
        raise NotFoundError(f"no task {name!r}; there are {', '.join(TASKS)}")
    return TASKS[name].open(setup)


def prepare_request(
    task: AnyTask, request: TaskRequest, *, max_tokens: int = MAX_TOKENS
) -> list[Prepared[Any]]:
    """Prepare every item of a request for the engine.

    Args:
        max_tokens: the limit of all items together.

    Raises:
        InvalidInputError: an item cannot be answered; of several items, the message says which.
        TooMuchAtOnceError: all items together exceed the limit of tokens, masks or answer bytes.
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
            raise type(error)(f"{request.inputs_field}[{number}]: {error}") from error
        # Checked after each item: preparing a list of maximum-size items would take hours.
        amount.add(prepared[-1])
    return prepared


class _Amount:
    """The total size of the items of a request so far."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = self._num_masks = self._num_held_bytes = 0

    def add(self, item: Prepared[Any]) -> None:
        """Add an item.

        Raises:
            TooMuchAtOnceError: the total exceeds the limit of tokens, masks or answer bytes.
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
                f"the answers would take over {MAX_HELD_BYTES} bytes: send fewer inputs, lower "
                "top_k, or pool the tokens' vectors"
            )


def read_cuts(request: TaskRequest, prepared: Sequence[Prepared[Any]]) -> dict[str, int]:
    """Return the offset of the first character that was cut off, by the place of the text.

    Places are those of error messages: "inputs", "inputs.question", "inputs[3].text_pair".
    """
    is_list, field = isinstance(request.inputs, list), request.inputs_field
    return {
        f"{field}[{number}]{place}" if is_list else f"{field}{place}": offset
        for number, item in enumerate(prepared)
        for place, offset in item.cuts.items()
    }


def shape_reply(request: TaskRequest, answers: Sequence[Any]) -> Any:
    """Return the reply in Hugging Face's format, from one answer an item.

    A single item is answered without a list; but text classification always answers a list of
    lists, because Hugging Face's clients take the first element of the reply.
    """
    if isinstance(request.inputs, list) or isinstance(request, TextClassificationRequest):
        return list(answers)
    return answers[0]
