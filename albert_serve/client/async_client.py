"""The Python client for asyncio: the twin of `sync_client.py`, whose methods are awaited."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Self, Unpack, overload

import httpx

from albert_serve.api.embeddings import Embedding
from albert_serve.api.schemas import (
    Coherence,
    FilledMasks,
    FillMaskAnswer,
    InfoReply,
    LabelScore,
    MultipleChoiceAnswer,
    Order,
    QuestionAnsweringAnswer,
    Reordering,
    TargetsAnswer,
)
from albert_serve.client import requests
from albert_serve.client.async_streams import AsyncStreams
from albert_serve.client.in_process import LOCAL_TIMEOUT_S, LOCAL_URL, open_transport
from albert_serve.client.replies import MAX_REPLY_BYTES
from albert_serve.client.requests import (
    ChoiceLike,
    ChoiceT,
    FeatureExtractionOptions,
    FillMaskOptions,
    MultipleChoiceOptions,
    PairLike,
    PairT,
    QuestionAnsweringOptions,
    QuestionLike,
    QuestionT,
    ScoreTargetsOptions,
    SentenceOrderOptions,
    TextClassificationOptions,
    TextLike,
    TextT,
    TokenFeaturesOptions,
)
from albert_serve.client.server import MAX_CONCURRENCY, NUM_RETRIES, TIMEOUT_S, Server
from albert_serve.client.transport import READY_TIMEOUT_S

if TYPE_CHECKING:
    from albert_serve.settings import Device


class AsyncAlbertClient(AsyncStreams):
    """`AlbertClient` for asyncio: the same methods, awaited, and streams for `async for`."""

    def __init__(
        self,
        base_url: str | None = None,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout_s: float = TIMEOUT_S,
        num_retries: int = NUM_RETRIES,
        max_concurrency: int = MAX_CONCURRENCY,
        max_reply_bytes: int = MAX_REPLY_BYTES,
        http_client: httpx.AsyncClient | None = None,
    ) -> None:
        server = Server.at(
            base_url,
            model=model,
            api_key=api_key,
            timeout_s=timeout_s,
            num_retries=num_retries,
            max_concurrency=max_concurrency,
            max_reply_bytes=max_reply_bytes,
        )
        super().__init__(server, http_client)

    @classmethod
    def local(
        cls,
        bundle: str | os.PathLike[str] | None = None,
        *,
        num_threads: int | None = None,
        device: Device = "auto",
        timeout_s: float = LOCAL_TIMEOUT_S,
    ) -> Self:
        """Open a model in this process, as `AlbertClient.local`; the arguments are the same.

        To open it takes about a second, during which the event loop waits; calls run in a thread
        of their own.
        """
        client = cls(
            LOCAL_URL,
            api_key="",
            timeout_s=timeout_s,
            num_retries=0,
            max_reply_bytes=sys.maxsize,
            http_client=httpx.AsyncClient(
                transport=open_transport(bundle, num_threads, device), trust_env=False
            ),
        )
        client._is_own = True
        return client

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections, unless they belong to the caller's `http_client`."""
        if self._is_own:
            await self._http.aclose()

    @overload
    async def fill_mask(
        self, inputs: str, **options: Unpack[FillMaskOptions]
    ) -> FillMaskAnswer: ...

    @overload
    async def fill_mask(
        self, inputs: list[str], **options: Unpack[FillMaskOptions]
    ) -> list[FillMaskAnswer]: ...

    async def fill_mask(
        self, inputs: str | list[str], **options: Unpack[FillMaskOptions]
    ) -> FillMaskAnswer | list[FillMaskAnswer]:
        """Return the likeliest tokens for the mask, or a list for each of several masks.

        The answer to a text with one `[MASK]` is a list of `FilledToken`s, the likeliest first;
        with several, such a list for each, in the order of the text.

        Raises:
            NoMaskError: a text has no mask.
        """
        return await self._send(requests.fill_mask(inputs, options))

    @overload
    async def fill_mask_jointly(
        self, inputs: str, **options: Unpack[FillMaskOptions]
    ) -> list[FilledMasks]: ...

    @overload
    async def fill_mask_jointly(
        self, inputs: list[str], **options: Unpack[FillMaskOptions]
    ) -> list[list[FilledMasks]]: ...

    async def fill_mask_jointly(
        self, inputs: str | list[str], **options: Unpack[FillMaskOptions]
    ) -> list[FilledMasks] | list[list[FilledMasks]]:
        """Return the likeliest joint fillings of all masks of a text.

        The surest mask is filled first, and the others are read again with it filled. The answer
        is a list of `FilledMasks`, the likeliest first; `top_k` is at most 16.

        Raises:
            NoMaskError: a text has no mask.
        """
        return await self._send(requests.fill_mask_jointly(inputs, options))

    @overload
    async def score_targets(
        self, inputs: str, targets: list[str], **options: Unpack[ScoreTargetsOptions]
    ) -> TargetsAnswer: ...

    @overload
    async def score_targets(
        self, inputs: list[str], targets: list[str], **options: Unpack[ScoreTargetsOptions]
    ) -> list[TargetsAnswer]: ...

    async def score_targets(
        self, inputs: str | list[str], targets: list[str], **options: Unpack[ScoreTargetsOptions]
    ) -> TargetsAnswer | list[TargetsAnswer]:
        """Return the score of each target, of one or several pieces, at the mask.

        Targets are compared as wholes, where `fill_mask` compares their first pieces. The answer is
        a list of `FilledTarget`s, the likeliest first, or such a list for each of several masks.

        Raises:
            NoMaskError: a text has no mask.
        """
        return await self._send(requests.score_targets(inputs, targets, options))

    @overload
    async def text_classification(
        self, inputs: TextLike, **options: Unpack[TextClassificationOptions]
    ) -> list[LabelScore]: ...

    @overload
    async def text_classification(
        self, inputs: list[TextT], **options: Unpack[TextClassificationOptions]
    ) -> list[list[LabelScore]]: ...

    async def text_classification(
        self, inputs: TextLike | list[TextT], **options: Unpack[TextClassificationOptions]
    ) -> list[LabelScore] | list[list[LabelScore]]:
        """Return the labels of a text or pair of texts, the best first.

        An input is a string, or `{"text", "text_pair"}` as a dictionary or a `TextInput`.
        """
        return await self._send(requests.text_classification(inputs, options))

    @overload
    async def question_answering(
        self, inputs: QuestionLike, **options: Unpack[QuestionAnsweringOptions]
    ) -> QuestionAnsweringAnswer: ...

    @overload
    async def question_answering(
        self, inputs: list[QuestionT], **options: Unpack[QuestionAnsweringOptions]
    ) -> list[QuestionAnsweringAnswer]: ...

    async def question_answering(
        self, inputs: QuestionLike | list[QuestionT], **options: Unpack[QuestionAnsweringOptions]
    ) -> QuestionAnsweringAnswer | list[QuestionAnsweringAnswer]:
        """Return the answer to a question in a context; a list with `top_k` over 1.

        An input is `{"question", "context"}` as a dictionary or a `QuestionContext`. A context of
        any length is read, in windows. With `handle_impossible_answer` the answer may be "".
        """
        return await self._send(requests.question_answering(inputs, options))

    @overload
    async def sentence_order(
        self, inputs: PairLike, **options: Unpack[SentenceOrderOptions]
    ) -> Order: ...

    @overload
    async def sentence_order(
        self, inputs: list[PairT], **options: Unpack[SentenceOrderOptions]
    ) -> list[Order]: ...

    async def sentence_order(
        self, inputs: PairLike | list[PairT], **options: Unpack[SentenceOrderOptions]
    ) -> Order | list[Order]:
        """Return the probability that the second text follows the first.

        An input is `{"text", "text_pair"}` as a dictionary or a `TextPair`.
        """
        return await self._send(requests.sentence_order(inputs, options))

    @overload
    async def coherence(
        self, sentences: list[str], **options: Unpack[SentenceOrderOptions]
    ) -> Coherence: ...

    @overload
    async def coherence(
        self, sentences: list[list[str]], **options: Unpack[SentenceOrderOptions]
    ) -> list[Coherence]: ...

    async def coherence(
        self, sentences: list[str] | list[list[str]], **options: Unpack[SentenceOrderOptions]
    ) -> Coherence | list[Coherence]:
        """Return the coherence of the sentences of a text, or of each of several texts.

        A text is a list of two sentences or more. The answer has the probability of each
        neighbouring pair, and their geometric mean.
        """
        return await self._send(requests.coherence(sentences, options))

    @overload
    async def reorder(
        self, sentences: list[str], **options: Unpack[SentenceOrderOptions]
    ) -> Reordering: ...

    @overload
    async def reorder(
        self, sentences: list[list[str]], **options: Unpack[SentenceOrderOptions]
    ) -> list[Reordering]: ...

    async def reorder(
        self, sentences: list[str] | list[list[str]], **options: Unpack[SentenceOrderOptions]
    ) -> Reordering | list[Reordering]:
        """Return the best order of the sentences of a text, or of each of several texts.

        A text is a list of 2 to 32 sentences, of which all pairs are read in both orders.
        The answer has the coherence of the order given, too.
        """
        return await self._send(requests.reorder(sentences, options))

    @overload
    async def multiple_choice(
        self, inputs: ChoiceLike, **options: Unpack[MultipleChoiceOptions]
    ) -> MultipleChoiceAnswer: ...

    @overload
    async def multiple_choice(
        self, inputs: list[ChoiceT], **options: Unpack[MultipleChoiceOptions]
    ) -> list[MultipleChoiceAnswer]: ...

    async def multiple_choice(
        self, inputs: ChoiceLike | list[ChoiceT], **options: Unpack[MultipleChoiceOptions]
    ) -> MultipleChoiceAnswer | list[MultipleChoiceAnswer]:
        """Return the choices of a question or text with their probabilities, the best first.

        An input is `{"context", "choices"}`, optionally with `"question"`, as a dictionary or a
        `ChoiceQuestion`.

        Raises:
            NotFoundError: the model has no head for multiple choice, as the one that ships.
        """
        return await self._send(requests.multiple_choice(inputs, options))

    @overload
    async def feature_extraction(
        self, inputs: str, **options: Unpack[FeatureExtractionOptions]
    ) -> Embedding: ...

    @overload
    async def feature_extraction(
        self, inputs: list[str], **options: Unpack[FeatureExtractionOptions]
    ) -> list[Embedding]: ...

    async def feature_extraction(
        self, inputs: str | list[str], **options: Unpack[FeatureExtractionOptions]
    ) -> Embedding | list[Embedding]:
        """Return the embedding of a text.

        It has as many numbers as the model's hidden states. The dot product of two that were made
        with `normalize=True` is their cosine similarity.
        """
        return await self._send(requests.feature_extraction(inputs, options))

    @overload
    async def token_features(
        self, inputs: str, **options: Unpack[TokenFeaturesOptions]
    ) -> list[Embedding]: ...

    @overload
    async def token_features(
        self, inputs: list[str], **options: Unpack[TokenFeaturesOptions]
    ) -> list[list[Embedding]]: ...

    async def token_features(
        self, inputs: str | list[str], **options: Unpack[TokenFeaturesOptions]
    ) -> list[Embedding] | list[list[Embedding]]:
        """Return the vector of each token of a text, [CLS] and [SEP] among them.

        The answer is a list of vectors, each of as many numbers as the model's hidden states.
        """
        return await self._send(requests.token_features(inputs, options))

    async def info(self) -> InfoReply:
        """Return the description of the hosted model, and the service's limits.

        That is its name, revision, precision and tasks, with the labels and the quality of each.
        """
        return await self._send(requests.info())

    async def health(self) -> bool:
        """Return whether the service takes requests now; one that is out of reach does not.

        Raises:
            RequestError: it refuses to tell, as for a model that it does not host.
        """
        return await self._hold(self._exchange.is_healthy())

    async def wait_until_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until the service takes requests, as after its start.

        Raises:
            NotReadyError: it does not within `timeout_s`; the message has what was seen last.
            RequestError: it refuses to tell, as for a model that it does not host.
        """
        await self._hold(self._exchange.wait_until_ready(timeout_s))
