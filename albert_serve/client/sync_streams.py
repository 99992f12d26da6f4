"""The streams of the client for threads: rows of any number in, their answers out, lazily."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from typing import Any, Self, TypeVar, Unpack

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
from albert_serve.client.sync_io import SyncIO
from albert_serve.errors import RequestError

_AnswerT = TypeVar("_AnswerT", covariant=True)


class AnswerStream(Iterator[_AnswerT]):
    """The answers to rows, in the order of the rows.

    Rows are read as answers are taken: about 500 ahead, in requests of up to 32, so that memory
    does not grow with their number. An error of the rows' iterator is raised after the answers to
    the rows before it. The end of `with`, and `close`, cancel what is under way.

    A row that is refused raises its error, and ends the stream; `with_errors` goes on instead. In
    both, `error.input_index` is the row's index. What is no fault of a row always ends the stream:
    a service that is overloaded or out of reach, also after all retries, a wrong key or option.
    """

    def __init__(self, results: Generator[Any, None, None]) -> None:
        self._results = results

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> _AnswerT:
        result: _AnswerT = next(self._results)
        if isinstance(result, RequestError):
            self.close()
            raise result
        return result

    def with_errors(self) -> Generator[_AnswerT | RequestError, None, None]:
        """Return the stream with the error of a refused row in place of its answer."""
        return self._results

    def close(self) -> None:
        """Cancel what is under way; there are no answers afterwards."""
        self._results.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SyncStreams(SyncIO):
    """A stream for each method that answers inputs; its options are those of the method."""

    def fill_mask_stream(
        self, rows: Iterable[str], **options: Unpack[FillMaskOptions]
    ) -> AnswerStream[FillMaskAnswer]:
        """Return a stream of what `fill_mask` returns for each row."""
        return AnswerStream(self._stream(rows, lambda inputs: requests.fill_mask(inputs, options)))

    def fill_mask_jointly_stream(
        self, rows: Iterable[str], **options: Unpack[FillMaskOptions]
    ) -> AnswerStream[list[FilledMasks]]:
        """Return a stream of what `fill_mask_jointly` returns for each row."""
        return AnswerStream(
            self._stream(rows, lambda inputs: requests.fill_mask_jointly(inputs, options))
        )

    def score_targets_stream(
        self, rows: Iterable[str], targets: list[str], **options: Unpack[ScoreTargetsOptions]
    ) -> AnswerStream[TargetsAnswer]:
        """Return a stream of what `score_targets` returns for each row."""
        return AnswerStream(
            self._stream(rows, lambda inputs: requests.score_targets(inputs, targets, options))
        )

    def text_classification_stream(
        self, rows: Iterable[TextLike], **options: Unpack[TextClassificationOptions]
    ) -> AnswerStream[list[LabelScore]]:
        """Return a stream of what `text_classification` returns for each row."""
        return AnswerStream(
            self._stream(rows, lambda inputs: requests.text_classification(inputs, options))
        )

    def question_answering_stream(
        self, rows: Iterable[QuestionLike], **options: Unpack[QuestionAnsweringOptions]
    ) -> AnswerStream[QuestionAnsweringAnswer]:
        """Return a stream of what `question_answering` returns for each row."""
        return AnswerStream(
            self._stream(rows, lambda inputs: requests.question_answering(inputs, options))
        )

    def sentence_order_stream(
        self, rows: Iterable[PairLike], **options: Unpack[SentenceOrderOptions]
    ) -> AnswerStream[Order]:
        """Return a stream of what `sentence_order` returns for each row."""
        return AnswerStream(
            self._stream(rows, lambda inputs: requests.sentence_order(inputs, options))
        )

    def coherence_stream(
        self, rows: Iterable[list[str]], **options: Unpack[SentenceOrderOptions]
    ) -> AnswerStream[Coherence]:
        """Return a stream of what `coherence` returns for each row."""
        return AnswerStream(
            self._stream(
                rows, lambda inputs: requests.coherence(requests.as_texts(inputs), options)
            )
        )

    def reorder_stream(
        self, rows: Iterable[list[str]], **options: Unpack[SentenceOrderOptions]
    ) -> AnswerStream[Reordering]:
        """Return a stream of what `reorder` returns for each row."""
        return AnswerStream(
            self._stream(rows, lambda inputs: requests.reorder(requests.as_texts(inputs), options))
        )

    def multiple_choice_stream(
        self, rows: Iterable[ChoiceLike], **options: Unpack[MultipleChoiceOptions]
    ) -> AnswerStream[MultipleChoiceAnswer]:
        """Return a stream of what `multiple_choice` returns for each row."""
        return AnswerStream(
            self._stream(rows, lambda inputs: requests.multiple_choice(inputs, options))
        )

    def feature_extraction_stream(
        self, rows: Iterable[str], **options: Unpack[FeatureExtractionOptions]
    ) -> AnswerStream[Embedding]:
        """Return a stream of what `feature_extraction` returns for each row."""
        return AnswerStream(
            self._stream(rows, lambda inputs: requests.feature_extraction(inputs, options))
        )

    def token_features_stream(
        self, rows: Iterable[str], **options: Unpack[TokenFeaturesOptions]
    ) -> AnswerStream[list[Embedding]]:
        """Return a stream of what `token_features` returns for each row."""
        return AnswerStream(
            self._stream(rows, lambda inputs: requests.token_features(inputs, options))
        )
