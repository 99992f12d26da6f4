"""What the client sends and how it reads what comes back, without any I/O."""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Generic, TypeAlias, TypedDict, TypeVar

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from albert_serve.errors import (
    ConfigError,
    DeadlineExceededError,
    InvalidInputError,
    NotReadyError,
    QueueFullError,
    RequestError,
    request_error,
)
from albert_serve.schemas import (
    TRUNCATED_HEADER,
    WARNINGS_HEADER,
    ErrorReply,
    FillMaskAnswer,
    FillMaskRequest,
    InfoReply,
    LabelScore,
    Order,
    QuestionAnsweringAnswer,
    QuestionAnsweringRequest,
    QuestionContext,
    ScoreFunction,
    SentenceOrderRequest,
    TextClassificationRequest,
    TextInput,
    TextPair,
    Truncation,
    describe,
)

_RETRIED: Final = frozenset({429, 503})
_MAX_TRIES: Final = 3
_FIRST_DELAY_S: Final = 0.1
_MAX_CHARS_TOLD: Final = 200

_logger = logging.getLogger(__name__)
ReplyT = TypeVar("ReplyT")

TextLike: TypeAlias = str | TextInput | Mapping[str, str]
PairLike: TypeAlias = TextPair | Mapping[str, str]
QuestionLike: TypeAlias = QuestionContext | Mapping[str, str]

# A list of any one of these, which `list[TextLike]` would not take.
TextT = TypeVar("TextT", bound=TextLike)
PairT = TypeVar("PairT", bound=PairLike)
QuestionT = TypeVar("QuestionT", bound=QuestionLike)


class FillMaskOptions(TypedDict, total=False):
    """The parameters of fill-mask; see `schemas.FillMaskParameters`."""

    top_k: int
    targets: str | list[str]
    truncation: Truncation


class TextClassificationOptions(TypedDict, total=False):
    """The parameters of text classification; see `schemas.TextClassificationParameters`."""

    function_to_apply: ScoreFunction
    top_k: int
    truncation: Truncation


class QuestionAnsweringOptions(TypedDict, total=False):
    """The parameters of question answering; see `schemas.QuestionAnsweringParameters`."""

    top_k: int
    doc_stride: int
    max_answer_len: int
    max_question_len: int
    max_seq_len: int
    handle_impossible_answer: bool
    align_to_words: bool
    truncation: Truncation


class SentenceOrderOptions(TypedDict, total=False):
    """The parameters of sentence order; see `schemas.SentenceOrderParameters`."""

    truncation: Truncation


@dataclass(frozen=True, kw_only=True, slots=True)
class Call(Generic[ReplyT]):
    """One request: where it goes, what it says, and how its reply is read."""

    method: str
    path: str
    body: dict[str, Any] | None
    read: Callable[[bytes], ReplyT]


def fill_mask(
    inputs: str | list[str], options: FillMaskOptions
) -> Call[FillMaskAnswer | list[FillMaskAnswer]]:
    """A call of `/fill-mask`.

    Raises:
        InvalidInputError: the service would refuse the inputs or an option.
    """
    return _post("/fill-mask", _body(FillMaskRequest, inputs, options), FillMaskAnswer)


def text_classification(
    inputs: TextLike | list[TextT], options: TextClassificationOptions
) -> Call[list[LabelScore] | list[list[LabelScore]]]:
    """A call of `/text-classification`, whose reply has one list more than a single text needs.

    Raises:
        InvalidInputError: the service would refuse the inputs or an option.
    """
    body = _body(TextClassificationRequest, inputs, options)
    read = _adapter(list[list[LabelScore]]).validate_json
    path = "/text-classification"
    if isinstance(inputs, list):
        return Call(method="POST", path=path, body=body, read=read)
    return Call(method="POST", path=path, body=body, read=lambda content: read(content)[0])


def question_answering(
    inputs: QuestionLike | list[QuestionT], options: QuestionAnsweringOptions
) -> Call[QuestionAnsweringAnswer | list[QuestionAnsweringAnswer]]:
    """A call of `/question-answering`.

    Raises:
        InvalidInputError: the service would refuse the inputs or an option.
    """
    body = _body(QuestionAnsweringRequest, inputs, options)
    return _post("/question-answering", body, QuestionAnsweringAnswer)


def sentence_order(
    inputs: PairLike | list[PairT], options: SentenceOrderOptions
) -> Call[Order | list[Order]]:
    """A call of `/sentence-order`.

    Raises:
        InvalidInputError: the service would refuse the inputs or an option.
    """
    return _post("/sentence-order", _body(SentenceOrderRequest, inputs, options), Order)


def info() -> Call[InfoReply]:
    """A call of `/info`."""
    return Call(method="GET", path="/info", body=None, read=InfoReply.model_validate_json)


def _post(path: str, body: dict[str, Any], answer: Any) -> Call[Any]:
    kind = list[answer] if isinstance(body["inputs"], list) else answer
    return Call(method="POST", path=path, body=body, read=_adapter(kind).validate_json)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _body(request: type[BaseModel], inputs: object, options: Mapping[str, Any]) -> dict[str, Any]:
    items = [_plain(item) for item in inputs] if isinstance(inputs, list) else _plain(inputs)
    given = {"inputs": items, "parameters": dict(options)}
    try:
        checked = request.model_validate(given)
    except ValidationError as error:
        raise InvalidInputError(describe(error)) from error
    return checked.model_dump(exclude_unset=True)


def _plain(item: object) -> object:
    return dict(item) if isinstance(item, Mapping) else item


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """Where calls go, and with what."""

    base_url: str
    headers: Mapping[str, str]
    timeout_s: float

    @classmethod
    def at(cls, base_url: str, api_key: str | None, timeout_s: float) -> Server:
        """A service at this address.

        Raises:
            ConfigError: the address is not one of HTTP, or the timeout is not positive.
        """
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(f"base_url is {base_url!r}; it must begin with http:// or https://")
        if not timeout_s > 0:
            raise ConfigError(f"timeout_s is {timeout_s}; it must be over 0")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        return cls(base_url=base_url.rstrip("/"), headers=headers, timeout_s=timeout_s)

    def explain(self, error: httpx.HTTPError) -> RequestError:
        """The error to raise for a call that got no reply."""
        if isinstance(error, httpx.TimeoutException):
            return DeadlineExceededError(
                f"no reply from {self.base_url} within {self.timeout_s:g} s; "
                "send less at once, or raise timeout_s"
            )
        reason = str(error) or type(error).__name__
        return NotReadyError(f"cannot reach {self.base_url}: {reason}; is the service running?")


class Tries:
    """Whether a call is made again: at 429 and 503, and only while its time lasts."""

    def __init__(self, timeout_s: float) -> None:
        self._ends_s = time.monotonic() + timeout_s
        self._num_made = 0

    @property
    def left_s(self) -> float:
        """Time that the call still has."""
        return max(0.001, self._ends_s - time.monotonic())

    def delay_s(self, response: httpx.Response) -> float | None:
        """How long to wait before trying again; None: take this response as it is."""
        self._num_made += 1
        if response.status_code not in _RETRIED or self._num_made == _MAX_TRIES:
            return None
        told_s = _retry_after_s(response)
        least_s = _FIRST_DELAY_S * 2**self._num_made if told_s is None else told_s
        # Spread out, so that clients that were refused together do not come back together.
        delay_s = least_s * random.uniform(1.0, 1.25)
        return delay_s if delay_s < self.left_s else None


def read_response(call: Call[ReplyT], response: httpx.Response) -> ReplyT:
    """The answer, or the error that the service gave.

    Raises:
        RequestError: the service refused, as the subclass that its status has; or the reply is
            not one of this service.
    """
    if not response.is_success:
        raise _refusal(response)
    _log_remarks(response)
    try:
        return call.read(response.content)
    except (ValidationError, LookupError) as error:
        raise RequestError(
            f"{response.url} replied with something that is not an answer of {call.path}; "
            f"is it an albert-serve of this version? It begins {_beginning(response)}"
        ) from error


def _refusal(response: httpx.Response) -> RequestError:
    try:
        told = ErrorReply.model_validate_json(response.content)
    except ValidationError:
        told = ErrorReply(
            error=f"{response.url} replied {response.status_code}: {_beginning(response)}",
            error_type="",
        )
    error = request_error(response.status_code, told.error, told.error_type)
    error.request_id = told.request_id
    after_s = _retry_after_s(response)
    if isinstance(error, QueueFullError) and after_s is not None:
        error.retry_after_s = after_s
    return error


def _retry_after_s(response: httpx.Response) -> float | None:
    """The seconds that the reply asks to wait; None where it does not say, or says a date."""
    told = response.headers.get("Retry-After", "")
    return float(told) if told.isdecimal() else None


def _log_remarks(response: httpx.Response) -> None:
    try:
        remarks = json.loads(response.headers.get(WARNINGS_HEADER, "[]"))
    except ValueError:
        remarks = []
    for remark in remarks:
        _logger.warning("%s: %s", response.url, remark)
    num_truncated = response.headers.get(TRUNCATED_HEADER, "0")
    if num_truncated != "0":
        _logger.warning("%s: %s tokens were cut off", response.url, num_truncated)


def _beginning(response: httpx.Response) -> str:
    return repr(response.text[:_MAX_CHARS_TOLD])
