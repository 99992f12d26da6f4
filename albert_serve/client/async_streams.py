"""The streams of the client for asyncio: the twin of `sync_streams.py`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable
from typing import Any, Self, TypeAlias, TypeVar, Unpack

from albert_serve.api.embeddings import Embedding
from albert_serve.api.schemas import (
    Coherence,
    FilledMasks,
    FillMaskAnswer,
    LabelScore,
    MultipleChoiceAnswer,
    Order,
    QuestionAnsweringAnswer,
    Reordering,
    TargetsAnswer,
)
from albert_serve.client import requests
from albert_serve.client.async_io import AsyncIO
from albert_serve.client.requests import (
    ChoiceLike,
    FeatureExtractionOptions,
    FillMaskOptions,
    MultipleChoiceOptions,
    PairLike,
    QuestionAnsweringOptions,
    QuestionLike,
    ScoreTargetsOptions,
    SentenceOrderOptions,
    TextClassificationOptions,
    TextLike,
    TokenFeaturesOptions,
)
from albert_serve.errors import RequestError

_RowT = TypeVar("_RowT")
_AnswerT = TypeVar("_AnswerT", covariant=True)
AnyIterable: TypeAlias = Iterable[_RowT] | AsyncIterable[_RowT]


class AsyncAnswerStream(AsyncIterator[_AnswerT]):
    """`AnswerStream` for asyncio: an asynchronous iterator, of rows of either kind; see there."""

    def __init__(self, results: AsyncGenerator[Any, None]) -> None:
        self._results = results

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> _AnswerT:
        result: _AnswerT = await anext(self._results)
        if isinstance(result, RequestError):
            await self.aclose()
            raise result
        return result

    def with_errors(self) -> AsyncGenerator[_AnswerT | RequestError, None]:
        """Return the stream with the error of a refused row in place of its answer."""
        return self._results

    async def aclose(self) -> None:
        """Cancel what is under way; there are no answers afterwards."""
        await self._results.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class AsyncStreams(AsyncIO):
    """A stream for each method that answers inputs; its options are those of the method."""

    def fill_mask_stream(
        self, rows: AnyIterable[str], **options: Unpack[FillMaskOptions]
    ) -> AsyncAnswerStream[FillMaskAnswer]:
        """Return a stream of what `fill_mask` returns for each row."""
        return AsyncAnswerStream(
            self._stream(rows, lambda inputs: requests.fill_mask(inputs, options))
        )

    def fill_mask_jointly_stream(
        self, rows: AnyIterable[str], **options: Unpack[FillMaskOptions]
    ) -> AsyncAnswerStream[list[FilledMasks]]:
        """Return a stream of what `fill_mask_jointly` returns for each row."""
        return AsyncAnswerStream(
            self._stream(rows, lambda inputs: requests.fill_mask_jointly(inputs, options))
        )

    def score_targets_stream(
        self, rows: AnyIterable[str], targets: list[str], **options: Unpack[ScoreTargetsOptions]
    ) -> AsyncAnswerStream[TargetsAnswer]:
        """Return a stream of what `score_targets` returns for each row."""
        return AsyncAnswerStream(
            self._stream(rows, lambda inputs: requests.score_targets(inputs, targets, options))
        )

    def text_classification_stream(
        self, rows: AnyIterable[TextLike], **options: Unpack[TextClassificationOptions]
    ) -> AsyncAnswerStream[list[LabelScore]]:
        """Return a stream of what `text_classification` returns for each row."""
        return AsyncAnswerStream(
            self._stream(rows, lambda inputs: requests.text_classification(inputs, options))
        )

    def question_answering_stream(
        self, rows: AnyIterable[QuestionLike], **options: Unpack[QuestionAnsweringOptions]
    ) -> AsyncAnswerStream[QuestionAnsweringAnswer]:
        """Return a stream of what `question_answering` returns for each row."""
        return AsyncAnswerStream(
            self._stream(rows, lambda inputs: requests.question_answering(inputs, options))
        )

    def sentence_order_stream(
        self, rows: AnyIterable[PairLike], **options: Unpack[SentenceOrderOptions]
    ) -> AsyncAnswerStream[Order]:
        """Return a stream of what `sentence_order` returns for each row."""
        return AsyncAnswerStream(
            self._stream(rows, lambda inputs: requests.sentence_order(inputs, options))
        )

    def coherence_stream(
        self, rows: AnyIterable[list[str]], **options: Unpack[SentenceOrderOptions]
    ) -> AsyncAnswerStream[Coherence]:
        """Return a stream of what `coherence` returns for each row."""
        return AsyncAnswerStream(
            self._stream(
                rows, lambda inputs: requests.coherence(requests.as_texts(inputs), options)
            )
        )

    def reorder_stream(
        self, rows: AnyIterable[list[str]], **options: Unpack[SentenceOrderOptions]
    ) -> AsyncAnswerStream[Reordering]:
        """Return a stream of what `reorder` returns for each row."""
        return AsyncAnswerStream(
            self._stream(rows, lambda inputs: requests.reorder(requests.as_texts(inputs), options))
        )

    def multiple_choice_stream(
        self, rows: AnyIterable[ChoiceLike], **options: Unpack[MultipleChoiceOptions]
    ) -> AsyncAnswerStream[MultipleChoiceAnswer]:
        """Return a stream of what `multiple_choice` returns for each row."""
        return AsyncAnswerStream(
            self._stream(rows, lambda inputs: requests.multiple_choice(inputs, options))
        )

    def feature_extraction_stream(
        self, rows: AnyIterable[str], **options: Unpack[FeatureExtractionOptions]
    ) -> AsyncAnswerStream[Embedding]:
        """Return a stream of what `feature_extraction` returns for each row."""
        return AsyncAnswerStream(
            self._stream(rows, lambda inputs: requests.feature_extraction(inputs, options))
        )

    def token_features_stream(
        self, rows: AnyIterable[str], **options: Unpack[TokenFeaturesOptions]
    ) -> AsyncAnswerStream[list[Embedding]]:
        """Return a stream of what `token_features` returns for each row."""
        return AsyncAnswerStream(
            self._stream(rows, lambda inputs: requests.token_features(inputs, options))
        )
