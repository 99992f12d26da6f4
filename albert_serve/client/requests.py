"""The endpoints of the client's methods, and the methods' options."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from operator import itemgetter
from typing import Annotated, Any, Final, Generic, Protocol, TypeAlias, TypedDict, TypeVar, cast

from pydantic import AfterValidator, BaseModel, Field, TypeAdapter

from albert_serve.api.embeddings import FEATURE_EXTRACTION as FEATURE_EXTRACTION_TASK
from albert_serve.api.embeddings import (
    Embedding,
    FeatureExtractionRequest,
    Pooled,
    TruncationDirection,
)
from albert_serve.api.schemas import (
    AggregationStrategy,
    AnyTruncation,
    Coherence,
    FillMaskAnswer,
    FillMaskRequest,
    InfoReply,
    LabelScore,
    Order,
    QuestionAnsweringAnswer,
    QuestionAnsweringRequest,
    QuestionContext,
    ScoreFunction,
    SentenceOrderAnswer,
    SentenceOrderRequest,
    TextClassificationRequest,
    TextInput,
    TextPair,
    TokenClassificationAnswer,
    TokenClassificationRequest,
)
from albert_serve.api.wire import MAX_ITEMS, validate
from albert_serve.api.zero_shot import ZERO_SHOT as ZERO_SHOT_PATH
from albert_serve.api.zero_shot import ZeroShotAnswer, ZeroShotRequest
from albert_serve.client.calls import Call, renumbered
from albert_serve.errors import InvalidInputError

TextLike: TypeAlias = str | TextInput | Mapping[str, str]
PairLike: TypeAlias = TextPair | Mapping[str, str]
QuestionLike: TypeAlias = QuestionContext | Mapping[str, str]


class Column(Protocol):
    """A column of texts in a DataFrame (pandas, polars), or an array."""

    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102


Texts: TypeAlias = list[str] | Column
AnswerT = TypeVar("AnswerT")
# These are type variables because lists are invariant: a `list[str]` is not a `list[TextLike]`.
TextT = TypeVar("TextT", bound=TextLike)
PairT = TypeVar("PairT", bound=PairLike)
QuestionT = TypeVar("QuestionT", bound=QuestionLike)


class FillMaskOptions(TypedDict, total=False):
    """Options of fill-mask; see `schemas.FillMaskParameters`."""

    top_k: int
    targets: str | list[str]
    truncation: AnyTruncation


class TextClassificationOptions(TypedDict, total=False):
    """Options of text classification; see `schemas.TextClassificationParameters`."""

    function_to_apply: ScoreFunction
    top_k: int
    head: str
    truncation: AnyTruncation


class QuestionAnsweringOptions(TypedDict, total=False):
    """Options of question answering; see `schemas.QuestionAnsweringParameters`."""

    top_k: int
    doc_stride: int
    max_answer_len: int
    max_question_len: int
    max_seq_len: int
    handle_impossible_answer: bool | None
    null_score_diff_threshold: float
    align_to_words: bool
    truncation: AnyTruncation


class SentenceOrderOptions(TypedDict, total=False):
    """Options of sentence order; see `schemas.SentenceOrderParameters`."""

    truncation: AnyTruncation


class TokenClassificationOptions(TypedDict, total=False):
    """Options of token classification; see `schemas.TokenClassificationParameters`."""

    aggregation_strategy: AggregationStrategy
    ignore_labels: list[str]
    stride: int
    truncation: AnyTruncation


class TokenFeaturesOptions(TypedDict, total=False):
    """Options of token vectors; see `embeddings.FeatureExtractionParameters`."""

    normalize: bool
    truncation: AnyTruncation
    truncate: bool
    truncation_direction: TruncationDirection


class FeatureExtractionOptions(TokenFeaturesOptions, total=False):
    """Options of embeddings; see `embeddings.FeatureExtractionParameters`."""

    pooling: Pooled


class ZeroShotOptions(TypedDict, total=False):
    """Options of zero-shot classification; see `zero_shot.ZeroShotParameters`."""

    hypothesis_template: str
    multi_label: bool
    truncation: AnyTruncation


def _plain(value: object) -> object:
    """Convert a column, array, tuple or iterator to a list, and a numpy number to a Python number.

    Other values are returned unchanged.
    """
    if isinstance(value, tuple | Iterator):
        return list(value)
    to_list = getattr(value, "tolist", None) or getattr(value, "to_list", None)
    return value if to_list is None else to_list()


def _as_dict(item: object) -> object:
    return dict(item) if isinstance(item, Mapping) else item


def _as_text(item: object) -> object:
    """Return a list of sentences as the endpoint expects it, or a pair as a dictionary."""
    return {"sentences": list(item)} if isinstance(item, list | tuple) else _as_dict(item)


def _list_of(kind: Any) -> Any:
    return list[kind]


def _only(kind: Any) -> Any:
    """Return a type that validates a list with one item and returns the item."""
    return Annotated[list[kind], Field(min_length=1, max_length=1), AfterValidator(itemgetter(0))]


@cache
def _reader(kind: Any) -> Callable[[bytes], Any]:
    return TypeAdapter(kind).validate_json


@dataclass(frozen=True, kw_only=True)
class CallSpec(Generic[AnswerT]):
    """A client method's endpoint, request type and reply type.

    Attributes:
        path: path of the endpoint.
        request: type of the request.
        answer: type of the answer to an input of a list.
        single: type of the reply to a single input, if it differs.
        implied: parameters that the method sets.
        as_item: function from an input of a list to the item that is sent.
    """

    path: str
    request: type[BaseModel]
    answer: Any
    single: Any = None
    implied: Mapping[str, Any] = field(default_factory=dict)
    as_item: Callable[[object], object] = _as_dict

    def call(self, inputs: object, options: Mapping[str, Any], *, start: int = 0) -> Call[Any]:
        """Return the call for an input, or for a list whose first input has the index `start`."""
        parameters = {name: _plain(value) for name, value in {**options, **self.implied}.items()}
        inputs = _plain(inputs)
        if not isinstance(inputs, list):
            body, reply = self._body(_as_dict(inputs), parameters), self.single or self.answer
        else:
            items = [self.as_item(item) for item in inputs]
            body = self._body(items[:MAX_ITEMS], parameters, start)
            # A request has at most MAX_ITEMS items, so the items are validated in slices.
            for index in range(MAX_ITEMS, len(items), MAX_ITEMS):
                rest = self._body(items[index : index + MAX_ITEMS], parameters, start + index)
                body["inputs"] += rest["inputs"]
            reply = _list_of(self.answer)
        return Call(method="POST", path=self.path, body=body, read=_reader(reply), start=start)

    def _body(self, inputs: object, parameters: object, start: int = 0) -> dict[str, Any]:
        try:
            validated = validate(self.request, {"inputs": inputs, "parameters": parameters})
        except InvalidInputError as error:
            raise InvalidInputError(renumbered(str(error), start)) from error
        return validated.model_dump(exclude_unset=True)


INFO: Final = Call(method="GET", path="/info", body=None, read=InfoReply.model_validate_json)
HEALTH: Final = Call(method="GET", path="/health", body=None, read=lambda _: None)
FILL_MASK: Final[CallSpec[FillMaskAnswer]] = CallSpec(
    path="/fill-mask", request=FillMaskRequest, answer=FillMaskAnswer
)
TEXT_CLASSIFICATION: Final[CallSpec[list[LabelScore]]] = CallSpec(
    path="/text-classification",
    request=TextClassificationRequest,
    answer=list[LabelScore],
    single=_only(list[LabelScore]),
)
QUESTION_ANSWERING: Final[CallSpec[QuestionAnsweringAnswer]] = CallSpec(
    path="/question-answering", request=QuestionAnsweringRequest, answer=QuestionAnsweringAnswer
)
SENTENCE_ORDER: Final[CallSpec[Order]] = CallSpec(
    path="/sentence-order", request=SentenceOrderRequest, answer=Order
)
COHERENCE: Final[CallSpec[Coherence]] = CallSpec(
    path="/sentence-order", request=SentenceOrderRequest, answer=Coherence, as_item=_as_text
)
ZERO_SHOT: Final[CallSpec[ZeroShotAnswer]] = CallSpec(
    path=f"/{ZERO_SHOT_PATH}", request=ZeroShotRequest, answer=ZeroShotAnswer
)
TOKEN_CLASSIFICATION: Final[CallSpec[TokenClassificationAnswer]] = CallSpec(
    path="/token-classification",
    request=TokenClassificationRequest,
    answer=TokenClassificationAnswer,
)
FEATURE_EXTRACTION: Final[CallSpec[Embedding]] = CallSpec(
    path="/feature-extraction", request=FeatureExtractionRequest, answer=Embedding
)
TOKEN_FEATURES: Final[CallSpec[list[Embedding]]] = CallSpec(
    path="/feature-extraction",
    request=FeatureExtractionRequest,
    answer=_only(list[Embedding]),
    implied={"pooling": "none"},
)


_STREAMS: Final[Mapping[str, CallSpec[Any]]] = {
    "fill-mask": FILL_MASK,
    "text-classification": TEXT_CLASSIFICATION,
    "question-answering": QUESTION_ANSWERING,
    "sentence-order": replace(COHERENCE, answer=SentenceOrderAnswer),
    "token-classification": TOKEN_CLASSIFICATION,
    FEATURE_EXTRACTION_TASK: FEATURE_EXTRACTION,
    ZERO_SHOT_PATH: ZERO_SHOT,
}


def stream_spec(task: str, options: Mapping[str, Any]) -> CallSpec[Any]:
    """Return the spec for the rows of a stream."""
    if task not in _STREAMS:
        raise InvalidInputError(f"Unknown task {task!r}. Choose one of {', '.join(_STREAMS)}.")
    has_token_vectors = task == FEATURE_EXTRACTION_TASK and options.get("pooling") == "none"
    return TOKEN_FEATURES if has_token_vectors else _STREAMS[task]


def one_or_more_texts(sentences: list[str] | list[list[str]]) -> object:
    """Return one input for the sentences of one text, and a list for several texts."""
    sentences = cast("list[str] | list[list[str]]", _plain(sentences))
    is_one = not sentences or not isinstance(sentences[0], list)
    return {"sentences": sentences} if is_one else sentences
