"""The requests of a client: each method's options, body, and parser of the reply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, TypeAlias, TypedDict, TypeVar

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
)
from albert_serve.api.wire import MAX_ITEMS, shorten
from albert_serve.client.calls import Call as Call
from albert_serve.client.calls import ReplyT as ReplyT
from albert_serve.client.calls import renumbered as renumbered
from albert_serve.client.calls import renumbered_places as renumbered_places
from albert_serve.errors import InvalidInputError

TextLike: TypeAlias = str | TextInput | Mapping[str, str]
PairLike: TypeAlias = TextPair | Mapping[str, str]
QuestionLike: TypeAlias = QuestionContext | Mapping[str, str]
ChoiceLike: TypeAlias = ChoiceQuestion | Mapping[str, Any]

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
    head: str
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


def health() -> Call[None]:
    """Return a call of `/health`, whose reply's content is not read."""
    return Call(method="GET", path="/health", body=None, read=lambda _: None)


def as_texts(rows: Sequence[object]) -> list[list[str]]:
    """Return rows as texts of several sentences each.

    Raises:
        InvalidInputError: a row is not a list; sentences alone would be taken for one text.
    """
    for index, row in enumerate(rows):
        if not isinstance(row, list | tuple):
            raise InvalidInputError(
                f"inputs[{index}] must be a list of sentences, not {shorten(row)}"
            )
    return [list(row) for row in rows]  # type: ignore[call-overload]


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


def _plain(item: object) -> object:
    return dict(item) if isinstance(item, Mapping) else item
