"""The requests of a client: each method's options, body, and parser of the reply."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any, Final, Generic, TypeAlias, TypedDict, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from albert_serve.api.embeddings import (
    Embedding,
    FeatureExtractionRequest,
    Pooled,
    TokenFeatures,
    TruncationDirection,
)
from albert_serve.api.schemas import (
    MAX_TOP_K,
    AnyTruncation,
    ChoiceQuestion,
    Coherence,
    FilledMasks,
    FillMaskAnswer,
    FillMaskRequest,
    InfoReply,
    LabelScore,
    MultipleChoiceAnswer,
    MultipleChoiceRequest,
    Order,
    QuestionAnsweringAnswer,
    QuestionAnsweringRequest,
    QuestionContext,
    Reordering,
    ScoreFunction,
    SentenceOrderRequest,
    TargetsAnswer,
    TextClassificationRequest,
    TextInput,
    TextPair,
    describe,
    num_items_of,
)
from albert_serve.api.wire import MAX_ITEMS
from albert_serve.errors import InvalidInputError

ReplyT = TypeVar("ReplyT")

TextLike: TypeAlias = str | TextInput | Mapping[str, str]
PairLike: TypeAlias = TextPair | Mapping[str, str]
QuestionLike: TypeAlias = QuestionContext | Mapping[str, str]
ChoiceLike: TypeAlias = ChoiceQuestion | Mapping[str, Any]

# At the beginning of a message, and of a place in a header.
_ITEM_INDEX: Final = re.compile(r"^(inputs)\[(\d+)\]")
_PLACE_INDEX: Final = re.compile(r'("inputs)\[(\d+)\]')

_AnswerT = TypeVar("_AnswerT")
# Type variables, because lists are invariant: `list[TextLike]` would not take a `list[str]`.
TextT = TypeVar("TextT", bound=TextLike)
PairT = TypeVar("PairT", bound=PairLike)
QuestionT = TypeVar("QuestionT", bound=QuestionLike)
ChoiceT = TypeVar("ChoiceT", bound=ChoiceLike)


class FillMaskOptions(TypedDict, total=False):
    """The parameters of fill-mask; see `schemas.FillMaskParameters`."""

    top_k: int
    targets: str | list[str]
    truncation: AnyTruncation


class ScoreTargetsOptions(TypedDict, total=False):
    """The parameters of target scoring; see `schemas.FillMaskParameters`."""

    top_k: int
    truncation: AnyTruncation


class TextClassificationOptions(TypedDict, total=False):
    """The parameters of text classification; see `schemas.TextClassificationParameters`."""

    function_to_apply: ScoreFunction
    top_k: int
    max_layers: int
    patience: int
    truncation: AnyTruncation


class QuestionAnsweringOptions(TypedDict, total=False):
    """The parameters of question answering; see `schemas.QuestionAnsweringParameters`."""

    top_k: int
    doc_stride: int
    max_answer_len: int
    max_question_len: int
    max_seq_len: int
    handle_impossible_answer: bool
    null_score_diff_threshold: float
    align_to_words: bool
    compat: bool
    truncation: AnyTruncation


class SentenceOrderOptions(TypedDict, total=False):
    """The parameters of sentence order; see `schemas.SentenceOrderParameters`."""

    truncation: AnyTruncation


class MultipleChoiceOptions(TypedDict, total=False):
    """The parameters of multiple choice; see `schemas.MultipleChoiceParameters`."""

    top_k: int
    truncation: AnyTruncation


class TokenFeaturesOptions(TypedDict, total=False):
    """The parameters of the vectors of tokens; see `embeddings.FeatureExtractionParameters`."""

    normalize: bool
    truncation: AnyTruncation
    truncate: bool
    truncation_direction: TruncationDirection


class FeatureExtractionOptions(TokenFeaturesOptions, total=False):
    """The parameters of embeddings; see `embeddings.FeatureExtractionParameters`."""

    pooling: Pooled


@dataclass(frozen=True, kw_only=True, slots=True)
class Call(Generic[ReplyT]):
    """One request, and the parser of its reply.

    Attributes:
        start: the index of its first item in the caller's list.
    """

    method: str
    path: str
    body: dict[str, Any] | None
    read: Callable[[bytes], ReplyT]
    start: int = 0

    @property
    def num_items(self) -> int:
        """The number of items in its list; 1 without a list."""
        return len(self._items) or 1

    @property
    def has_list(self) -> bool:
        """Whether it asks about a list, and so is answered with one."""
        return isinstance((self.body or {}).get("inputs"), list)

    @property
    def _items(self) -> list[Any]:
        items: list[Any] = (self.body or {})["inputs"] if self.has_list else []
        return items

    def parts(self, limits: InfoReply) -> list[Call[ReplyT]]:
        """Split the list into calls within the limits of items and bytes.

        An item that exceeds a limit by itself is sent alone.
        """
        num_free = limits.max_body_bytes - _num_bytes({**(self.body or {}), "inputs": []})
        starts = [0]
        num_used = num_items = 0
        for index, item in enumerate(self._items):
            num_more = _num_bytes(item) + 1  # and a comma
            counted = num_items_of(item)
            is_full = num_items + counted > limits.max_items or num_used + num_more > num_free
            if index > starts[-1] and is_full:
                starts.append(index)
                num_used = num_items = 0
            num_used += num_more
            num_items += counted
        return [self._part(start, end) for start, end in pairwise([*starts, self.num_items])]

    def halves(self) -> list[Call[ReplyT]]:
        """Split the list into two calls."""
        middle = len(self._items) // 2
        return [self._part(0, middle), self._part(middle, self.num_items)]

    def _part(self, start: int, end: int) -> Call[ReplyT]:
        body = {**(self.body or {}), "inputs": self._items[start:end]}
        return replace(self, body=body, start=self.start + start)


def _num_bytes(value: object) -> int:
    """Return the length of a value as httpx serialises it, or a little more."""
    return len(json.dumps(value, ensure_ascii=False).encode())


def fill_mask(
    inputs: str | list[str], options: FillMaskOptions
) -> Call[FillMaskAnswer | list[FillMaskAnswer]]:
    """Return a call of `/fill-mask`.

    Raises:
        InvalidInputError: the service would refuse the inputs or an option.
    """
    return _post("/fill-mask", _body(FillMaskRequest, inputs, options), FillMaskAnswer)


def fill_mask_jointly(
    inputs: str | list[str], options: FillMaskOptions
) -> Call[list[FilledMasks] | list[list[FilledMasks]]]:
    """Return a call of `/fill-mask` for all masks of a text together.

    Raises:
        InvalidInputError: the service would refuse the inputs or an option.
    """
    body = _body(FillMaskRequest, inputs, {**options, "joint": True})
    return _post("/fill-mask", body, list[FilledMasks])


def score_targets(
    inputs: str | list[str], targets: Sequence[str], options: ScoreTargetsOptions
) -> Call[TargetsAnswer | list[TargetsAnswer]]:
    """Return a call of `/fill-mask` for targets of any number of pieces; by default all.

    Raises:
        InvalidInputError: the service would refuse the inputs, the targets or an option.
    """
    parameters = {
        "top_k": min(max(1, len(targets)), MAX_TOP_K),
        **options,
        "targets": list(targets),
        "multi_token_targets": True,
    }
    return _post("/fill-mask", _body(FillMaskRequest, inputs, parameters), TargetsAnswer)


def text_classification(
    inputs: TextLike | list[TextT], options: TextClassificationOptions
) -> Call[list[LabelScore] | list[list[LabelScore]]]:
    """Return a call of `/text-classification`; for a single text the reply's outer list is removed.

    Raises:
        InvalidInputError: the service would refuse the inputs or an option.
    """
    body = _body(TextClassificationRequest, inputs, options)
    read = _adapter(list[list[LabelScore]]).validate_json
    path = "/text-classification"
    if isinstance(inputs, list):
        return Call(method="POST", path=path, body=body, read=read)
    return Call(method="POST", path=path, body=body, read=lambda content: _only(read(content)))


def _only(answers: list[_AnswerT]) -> _AnswerT:
    """Return the one answer of a list; a ValueError if there are others or none."""
    [answer] = answers
    return answer


def question_answering(
    inputs: QuestionLike | list[QuestionT], options: QuestionAnsweringOptions
) -> Call[QuestionAnsweringAnswer | list[QuestionAnsweringAnswer]]:
    """Return a call of `/question-answering`.

    Raises:
        InvalidInputError: the service would refuse the inputs or an option.
    """
    body = _body(QuestionAnsweringRequest, inputs, options)
    return _post("/question-answering", body, QuestionAnsweringAnswer)


def sentence_order(
    inputs: PairLike | list[PairT], options: SentenceOrderOptions
) -> Call[Order | list[Order]]:
    """Return a call of `/sentence-order` for pairs.

    Raises:
        InvalidInputError: the service would refuse the inputs or an option.
    """
    return _post("/sentence-order", _body(SentenceOrderRequest, inputs, options), Order)


def coherence(
    sentences: list[str] | list[list[str]], options: SentenceOrderOptions
) -> Call[Coherence | list[Coherence]]:
    """Return a call of `/sentence-order` for the sentences of a text, or of several texts.

    Raises:
        InvalidInputError: the service would refuse the sentences or an option.
    """
    body = _body(SentenceOrderRequest, _as_sentences(sentences), options)
    return _post("/sentence-order", body, Coherence)


def reorder(
    sentences: list[str] | list[list[str]], options: SentenceOrderOptions
) -> Call[Reordering | list[Reordering]]:
    """Return a call of `/sentence-order` for the best order of sentences.

    Raises:
        InvalidInputError: the service would refuse the sentences or an option.
    """
    parameters = {**options, "reorder": True}
    body = _body(SentenceOrderRequest, _as_sentences(sentences), parameters)
    return _post("/sentence-order", body, Reordering)


def multiple_choice(
    inputs: ChoiceLike | list[ChoiceT], options: MultipleChoiceOptions
) -> Call[MultipleChoiceAnswer | list[MultipleChoiceAnswer]]:
    """Return a call of `/multiple-choice`.

    Raises:
        InvalidInputError: the service would refuse the inputs or an option.
    """
    body = _body(MultipleChoiceRequest, inputs, options)
    return _post("/multiple-choice", body, MultipleChoiceAnswer)


def feature_extraction(
    inputs: str | list[str], options: FeatureExtractionOptions
) -> Call[Embedding | list[Embedding]]:
    """Return a call of `/feature-extraction` for embeddings.

    Raises:
        InvalidInputError: the service would refuse the inputs or an option.
    """
    return _post("/feature-extraction", _body(FeatureExtractionRequest, inputs, options), Embedding)


def token_features(
    inputs: str | list[str], options: TokenFeaturesOptions
) -> Call[list[Embedding] | list[list[Embedding]]]:
    """Return a call of `/feature-extraction` for the vectors of tokens.

    Raises:
        InvalidInputError: the service would refuse the inputs or an option.
    """
    body = _body(FeatureExtractionRequest, inputs, {**options, "pooling": "none"})
    call: Call[Any] = _post("/feature-extraction", body, TokenFeatures)
    return replace(call, read=lambda content: _without_batch(call.read(content), inputs))


def _without_batch(reply: Any, inputs: str | list[str]) -> Any:
    """Return the tokens' vectors of each text, of which the reply has a list of one text."""
    return [_only(one) for one in reply] if isinstance(inputs, list) else _only(reply)


def info() -> Call[InfoReply]:
    """Return a call of `/info`."""
    return Call(method="GET", path="/info", body=None, read=InfoReply.model_validate_json)


def _as_sentences(sentences: list[str] | list[list[str]]) -> object:
    if sentences and isinstance(sentences[0], list):
        return [{"sentences": text} for text in sentences]
    return {"sentences": sentences}


def _post(path: str, body: dict[str, Any], answer: Any) -> Call[Any]:
    kind = list[answer] if isinstance(body["inputs"], list) else answer
    return Call(method="POST", path=path, body=body, read=_adapter(kind).validate_json)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _body(request: type[BaseModel], inputs: object, options: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(inputs, list):
        return _checked(request, _plain(inputs), options)
    items = [_plain(item) for item in inputs]
    # Validated in slices, because a request has at most MAX_ITEMS items.
    body = _checked(request, items[:MAX_ITEMS], options)
    for start in range(MAX_ITEMS, len(items), MAX_ITEMS):
        try:
            more = _checked(request, items[start : start + MAX_ITEMS], options)
        except InvalidInputError as error:
            raise InvalidInputError(renumbered(str(error), start)) from error
        body["inputs"] += more["inputs"]
    return body


def _checked(request: type[BaseModel], inputs: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    try:
        checked = request.model_validate({"inputs": inputs, "parameters": dict(options)})
    except ValidationError as error:
        raise InvalidInputError(describe(error)) from error
    return checked.model_dump(exclude_unset=True)


def renumbered(message: str, num_before: int) -> str:
    """Return a message about an item with the item's index in the whole list."""
    return _renumbered(_ITEM_INDEX, message, num_before)


def renumbered_places(places: str, num_before: int) -> str:
    """Return the header of cuts with the texts' indices in the whole list."""
    return _renumbered(_PLACE_INDEX, places, num_before)


def _renumbered(pattern: re.Pattern[str], text: str, num_before: int) -> str:
    return pattern.sub(lambda match: f"{match[1]}[{int(match[2]) + num_before}]", text)


def _plain(item: object) -> object:
    return dict(item) if isinstance(item, Mapping) else item
