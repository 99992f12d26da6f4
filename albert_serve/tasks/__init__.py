"""The tasks by endpoint name, and the functions that the service and batch scoring share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from albert_serve.api.embeddings import FEATURE_EXTRACTION, FeatureExtractionRequest
from albert_serve.api.schemas import (
    MAX_MASKS,
    FeatureExtractionReply,
    FillMaskReply,
    FillMaskRequest,
    QuestionAnsweringReply,
    QuestionAnsweringRequest,
    SentenceOrderReply,
    SentenceOrderRequest,
    TaskRequest,
    TextClassificationReply,
    TextClassificationRequest,
    TokenClassificationReply,
    TokenClassificationRequest,
)
from albert_serve.api.wire import MAX_CHARS, Parameters, Request
from albert_serve.bundle.manifest import Bundle, Manifest
from albert_serve.bundle.sentence_vectors import SentenceVectors
from albert_serve.bundle.weights import TOKENS
from albert_serve.errors import InvalidInputError, NotFoundError, TooMuchAtOnceError
from albert_serve.tasks.base import EncoderInput, Logits, Prepared, Task, TaskSetup
from albert_serve.tasks.feature_extraction import FeatureExtraction
from albert_serve.tasks.fill_mask import FillMask
from albert_serve.tasks.question_answering.task import QuestionAnswering
from albert_serve.tasks.sentence_order import SentenceOrder
from albert_serve.tasks.text_classification import TextClassification
from albert_serve.tasks.token_classification.task import TokenClassification
from albert_serve.tokenizer import AlbertTokenizer

__all__ = [
    "TASKS",
    "EncoderInput",
    "Endpoint",
    "FeatureExtraction",
    "FillMask",
    "Logits",
    "Prepared",
    "QuestionAnswering",
    "SentenceOrder",
    "Task",
    "TaskSetup",
    "TextClassification",
    "TokenClassification",
    "open_task",
    "prepare_request",
    "shape_reply",
]

# Default maximum number of tokens in all items of a request together.
MAX_TOKENS: Final = 1 << 20
_MAX_ANSWER_BYTES: Final = 1 << 26
# A request may have this many characters per allowed token: 4 Mi in a service by default.
_CHARS_PER_TOKEN: Final = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """The endpoint of a task.

    Attributes:
        request: schema of a request.
        reply: type of a reply's value.
        open: function that makes the task for a model.
    """

    request: type[TaskRequest]
    reply: Any
    open: Callable[[TaskSetup], Task]

    @property
    def parameters(self) -> type[Parameters]:
        """The schema of a request's parameters."""
        return type(self.request.model_fields["parameters"].default)


TASKS: Final[dict[str, Endpoint]] = {
    "fill-mask": Endpoint(request=FillMaskRequest, reply=FillMaskReply, open=FillMask),
    "text-classification": Endpoint(
        request=TextClassificationRequest,
        reply=TextClassificationReply,
        open=TextClassification,
    ),
    "question-answering": Endpoint(
        request=QuestionAnsweringRequest, reply=QuestionAnsweringReply, open=QuestionAnswering.open
    ),
    "sentence-order": Endpoint(
        request=SentenceOrderRequest, reply=SentenceOrderReply, open=SentenceOrder
    ),
    TOKENS: Endpoint(
        request=TokenClassificationRequest,
        reply=TokenClassificationReply,
        open=TokenClassification,
    ),
    FEATURE_EXTRACTION: Endpoint(
        request=FeatureExtractionRequest, reply=FeatureExtractionReply, open=FeatureExtraction
    ),
}


def open_task(name: str, setup: TaskSetup) -> Task:
    """Return the task with this name for a model."""
    if name not in TASKS:
        raise NotFoundError(f"There is no task {name!r}. Choose one of {', '.join(TASKS)}.")
    return TASKS[name].open(setup)


def prepare_request(
    task: Task, request: TaskRequest, *, max_tokens: int = MAX_TOKENS
) -> list[Prepared[Any]]:
    """Prepare every item of a request for the engine.

    Args:
        max_tokens: maximum number of tokens in all items together.
    """
    is_list = isinstance(request.inputs, list)
    _check_chars(request, max(MAX_CHARS, _CHARS_PER_TOKEN * max_tokens))
    prepared: list[Prepared[Any]] = []
    num_tokens = num_rows = answer_bytes = 0
    for number, item in enumerate(request.inputs if is_list else [request.inputs]):
        try:
            prepared.append(task.prepare(item, request.parameters))
        except InvalidInputError as error:
            if not is_list:
                raise
            raise type(error)(f"{request.inputs_field}[{number}]: {error}") from error
        num_tokens += prepared[-1].num_tokens
        num_rows += _num_vocabulary_rows(prepared[-1])
        answer_bytes += prepared[-1].answer_bytes
        # The sums are checked after each item: preparing a list of long texts would take hours.
        if num_tokens > max_tokens:
            raise TooMuchAtOnceError(f"The request has more than {max_tokens} tokens. Split it.")
        if num_rows > MAX_MASKS:
            raise TooMuchAtOnceError(
                f"The request has {num_rows} masks or more; at most {MAX_MASKS} are allowed. Send "
                "fewer texts or masks."
            )
        if answer_bytes > _MAX_ANSWER_BYTES:
            raise TooMuchAtOnceError(
                f"The answers would take more than {_MAX_ANSWER_BYTES} bytes. Send fewer inputs, "
                "lower top_k, or pool the tokens' vectors."
            )
    return prepared


def _check_chars(request: TaskRequest, max_chars: int) -> None:
    """Reject a request with too many characters before any text is encoded."""
    num_items = len(request.inputs) if isinstance(request.inputs, list) else 1
    num_chars = _num_chars(request.inputs) + num_items * request.parameters.chars_per_item
    if num_chars > max_chars:
        raise TooMuchAtOnceError(
            f"The model would read {num_chars} characters; at most {max_chars} are allowed per "
            "request. Send fewer or shorter texts."
        )


def _num_chars(value: object) -> int:
    """Return the number of characters in all texts of a request's inputs."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, list):
        return sum(map(_num_chars, value))
    return sum(_num_chars(field) for _, field in value) if isinstance(value, Request) else 0


def _num_vocabulary_rows(prepared: Prepared[Any]) -> int:
    """Return the number of vocabulary-wide rows of logits, which need the most memory."""
    return sum(len(item.rows or ()) for item in prepared.inputs if item.task == "fill-mask")


def shape_reply(request: TaskRequest, answers: Sequence[Any]) -> Any:
    """Return the reply in Hugging Face's format, from one answer per item.

    The reply to a single item is not a list. The reply of text classification is always a list of
    lists, because Hugging Face's clients take its first element.
    """
    if isinstance(request.inputs, list) or isinstance(request, TextClassificationRequest):
        return list(answers)
    return answers[0]


def task_names(manifest: Manifest) -> list[str]:
    """Return the names of a bundle's tasks that have an endpoint.

    Every bundle has feature extraction, which needs no head and is not in the manifest.
    """
    return [*(name for name in manifest.tasks if name in TASKS), FEATURE_EXTRACTION]


def load_setups(bundle: Bundle, tokenizer: AlbertTokenizer | None = None) -> dict[str, TaskSetup]:
    """Return the setup of each task of the bundle that has an endpoint, by name.

    Args:
        tokenizer: tokenizer of the bundle (default: it is read from the bundle).
    """
    tokenizer = tokenizer or AlbertTokenizer.from_file(bundle.tokenizer_file)
    return {
        name: TaskSetup(
            tokenizer=tokenizer,
            max_positions=bundle.config.max_positions,
            hidden_size=bundle.config.hidden_size,
            heads=bundle.manifest.heads_of(name),
            sentence_vectors=bundle.manifest.sentence_vectors or SentenceVectors(),
        )
        for name in task_names(bundle.manifest)
    }


def load_tasks(bundle: Bundle, tokenizer: AlbertTokenizer | None = None) -> dict[str, Task]:
    """Return each task of the bundle that has an endpoint, by name; see `load_setups`."""
    setups = load_setups(bundle, tokenizer)
    return {name: open_task(name, setup) for name, setup in setups.items()}
