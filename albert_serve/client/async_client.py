"""The Python client: the service's endpoints as typed methods.

Needs httpx and pydantic only. `requests.py` has the endpoints and their options; requests are sent
in `async_exchange.py`, again where `retries.py` says so, and long lists in parts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Self, Unpack, overload

import httpx

from albert_serve.api.embeddings import Embedding
from albert_serve.api.schemas import (
    Coherence,
    FillMaskAnswer,
    InfoReply,
    LabelScore,
    Order,
    QuestionAnsweringAnswer,
    TokenClassificationAnswer,
)
from albert_serve.api.zero_shot import ZeroShotAnswer
from albert_serve.client import requests
from albert_serve.client.async_exchange import AsyncAnswerStream, AsyncExchange
from albert_serve.client.concurrency import AnyIterable
from albert_serve.client.requests import (
    Column,
    FeatureExtractionOptions,
    FillMaskOptions,
    PairLike,
    PairT,
    QuestionAnsweringOptions,
    QuestionLike,
    QuestionT,
    SentenceOrderOptions,
    TextClassificationOptions,
    TextLike,
    TextT,
    TokenClassificationOptions,
    TokenFeaturesOptions,
    ZeroShotOptions,
)
from albert_serve.client.server import (
    LOCAL_TIMEOUT_S,
    LOCAL_URL,
    MAX_CONCURRENCY,
    MAX_REPLY_BYTES,
    NUM_RETRIES,
    READY_TIMEOUT_S,
    TIMEOUT_S,
    Server,
    authorization,
    open_transport,
    service_url,
)
from albert_serve.errors import ConfigError

if TYPE_CHECKING:
    from albert_serve.settings import Device


class AsyncAlbertClient:
    """Calls a service from asyncio, on one event loop at a time.

    A method takes one input or a list, and returns one result or a list; a column of a frame
    (pandas, polars) or an array is taken as a list. Its options are the parameters of the endpoint,
    with the service's defaults. A long list is split into as many requests as the service's limits
    require, several of which are sent at once. `stream` answers rows of any number.

    A request is retried if the service is overloaded, not ready, or out of reach, after the delay
    that the service asks for.

    Args:
        base_url: the service's address, such as "http://127.0.0.1:3000"; None for that in the
            environment's ALBERT_URL.
        model: the name of a hosted model; None for the service's default.
        api_key: sent as a bearer token; None for that in the environment's ALBERT_API_KEY, if it
            is set; "" for none.
        timeout_s: the time limit of a call, with all its requests and waits.
        num_retries: the limit of retries of a request.
        max_concurrency: the limit of requests at once, of a list or of a stream.
        max_reply_bytes: the limit of a reply, decoded; one that is over it is not read to its end.
        http_client: used instead of a new one; it stays open when this client closes.

    Every method raises:
        InvalidInputError: the inputs or options are refused, by the service or before sending.
        QueueFullError: the service is overloaded, also after all retries.
        NotReadyError: the service cannot be reached, is starting, or is draining.
        DeadlineExceededError: there was no reply in time.
        RequestError: any other refusal, as the subclass that its status has; or a reply that is
            not one of this service, is too large, or has not one answer for each input.
    """

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
        server = Server(
            base_url=service_url(base_url, model),
            headers=authorization(api_key),
            timeout_s=timeout_s,
            num_retries=num_retries,
            max_concurrency=max_concurrency,
            max_reply_bytes=max_reply_bytes,
        )
        self._exchange = AsyncExchange(server, http_client)

    @classmethod
    def local(
        cls,
        bundle: str | os.PathLike[str] | None = None,
        *,
        num_threads: int | None = None,
        device: Device = "auto",
        timeout_s: float = LOCAL_TIMEOUT_S,
    ) -> Self:
        """Open a model in this process: the same methods and answers, without a service.

            async with AsyncAlbertClient.local("models/albert-small-en") as albert:
                await albert.fill_mask("Paris is the capital of [MASK].")

        Needs the extra `albert-serve[serve]`. Nothing listens, and no setting is read from the
        environment. No call is refused because of others, so that there is no 429. `aclose` or
        the end of `async with` frees the model.

        Args:
            bundle: the folder of a bundle or a checkpoint, `bentoml:NAME[:VERSION]`, or OWNER/NAME
                on the Hugging Face Hub; by default the bundle that ships in `models/`. A checkpoint
                is exported first, which needs the extra `train`.
            num_threads: threads of one run; None: the CPUs that this process may use.
            device: "cpu", "cuda", or "auto": CUDA where a call on it succeeds.
            timeout_s: the time limit of a call.

        Raises:
            ConfigError: the extra is not installed, an option is invalid, or no bundle is named
                and none ships.
            BundleError: the bundle is missing, damaged, or of another format.
            EngineError: it cannot be run here, or not on that device.
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
        client._exchange.is_own = True
        return client

    def __reduce__(self) -> NoReturn:
        raise ConfigError(
            f"a {type(self).__name__} cannot be pickled or copied, as its connections cannot; make "
            "one in each process, as in the initializer of a pool"
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections, unless they belong to the caller's `http_client`."""
        await self._exchange.aclose()

    @overload
    async def fill_mask(
        self, inputs: str, **options: Unpack[FillMaskOptions]
    ) -> FillMaskAnswer: ...

    @overload
    async def fill_mask(
        self, inputs: list[str] | Column, **options: Unpack[FillMaskOptions]
    ) -> list[FillMaskAnswer]: ...

    async def fill_mask(
        self, inputs: str | list[str] | Column, **options: Unpack[FillMaskOptions]
    ) -> FillMaskAnswer | list[FillMaskAnswer]:
        """Return the likeliest tokens for the mask, or a list for each of several masks.

        The answer to a text with one `[MASK]` is a list of `FilledToken`s, the likeliest first;
        with several, such a list for each, in the order of the text.

        Raises:
            NoMaskError: a text has no mask.
        """
        return await self._exchange.ask(requests.FILL_MASK, inputs, options)

    @overload
    async def text_classification(
        self, inputs: TextLike, **options: Unpack[TextClassificationOptions]
    ) -> list[LabelScore]: ...

    @overload
    async def text_classification(
        self, inputs: list[TextT] | Column, **options: Unpack[TextClassificationOptions]
    ) -> list[list[LabelScore]]: ...

    async def text_classification(
        self, inputs: TextLike | list[TextT] | Column, **options: Unpack[TextClassificationOptions]
    ) -> list[LabelScore] | list[list[LabelScore]]:
        """Return the labels of a text or pair of texts, the best first.

        An input is a string, or `{"text", "text_pair"}` as a dictionary or a `TextInput`.
        """
        return await self._exchange.ask(requests.TEXT_CLASSIFICATION, inputs, options)

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
        any length is read, in windows. The answer may be "" with
        `handle_impossible_answer`, and by default of a model that has a threshold for it.
        """
        return await self._exchange.ask(requests.QUESTION_ANSWERING, inputs, options)

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
        return await self._exchange.ask(requests.SENTENCE_ORDER, inputs, options)

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
        texts = requests.one_or_more_texts(sentences)
        return await self._exchange.ask(requests.COHERENCE, texts, options)

    @overload
    async def zero_shot_classification(
        self, inputs: str, candidate_labels: str | Sequence[str], **options: Unpack[ZeroShotOptions]
    ) -> ZeroShotAnswer: ...

    @overload
    async def zero_shot_classification(
        self,
        inputs: list[str] | Column,
        candidate_labels: str | Sequence[str],
        **options: Unpack[ZeroShotOptions],
    ) -> list[ZeroShotAnswer]: ...

    async def zero_shot_classification(
        self,
        inputs: str | list[str] | Column,
        candidate_labels: str | Sequence[str],
        **options: Unpack[ZeroShotOptions],
    ) -> ZeroShotAnswer | list[ZeroShotAnswer]:
        """Return labels that the model was not trained on with their scores, the best first.

        The labels are a list, or a text that is split at its commas.

        Raises:
            NotFoundError: the model has no classifier with a label of entailment, as the one that
                ships.
        """
        is_text = isinstance(candidate_labels, str)
        labels = candidate_labels if is_text else list(candidate_labels)
        parameters = {**options, "candidate_labels": labels}
        return await self._exchange.ask(requests.ZERO_SHOT, inputs, parameters)

    @overload
    async def token_classification(
        self, inputs: str, **options: Unpack[TokenClassificationOptions]
    ) -> TokenClassificationAnswer: ...

    @overload
    async def token_classification(
        self, inputs: list[str] | Column, **options: Unpack[TokenClassificationOptions]
    ) -> list[TokenClassificationAnswer]: ...

    async def token_classification(
        self, inputs: str | list[str] | Column, **options: Unpack[TokenClassificationOptions]
    ) -> TokenClassificationAnswer | list[TokenClassificationAnswer]:
        """Return the entities of a text in its order: `EntityGroup`s, with their places.

        With `aggregation_strategy="none"` they are tokens, `ClassifiedToken`s. A text of any length
        is read, in windows.

        Raises:
            NotFoundError: the model has no head for token classification, as the one that ships.
        """
        return await self._exchange.ask(requests.TOKEN_CLASSIFICATION, inputs, options)

    @overload
    async def feature_extraction(
        self, inputs: str, **options: Unpack[FeatureExtractionOptions]
    ) -> Embedding: ...

    @overload
    async def feature_extraction(
        self, inputs: list[str] | Column, **options: Unpack[FeatureExtractionOptions]
    ) -> list[Embedding]: ...

    async def feature_extraction(
        self, inputs: str | list[str] | Column, **options: Unpack[FeatureExtractionOptions]
    ) -> Embedding | list[Embedding]:
        """Return the embedding of a text.

        It has as many numbers as the model's hidden states. The dot product of two that were made
        with `normalize=True` is their cosine similarity.
        """
        return await self._exchange.ask(requests.FEATURE_EXTRACTION, inputs, options)

    @overload
    async def token_features(
        self, inputs: str, **options: Unpack[TokenFeaturesOptions]
    ) -> list[Embedding]: ...

    @overload
    async def token_features(
        self, inputs: list[str] | Column, **options: Unpack[TokenFeaturesOptions]
    ) -> list[list[Embedding]]: ...

    async def token_features(
        self, inputs: str | list[str] | Column, **options: Unpack[TokenFeaturesOptions]
    ) -> list[Embedding] | list[list[Embedding]]:
        """Return the vector of each token of a text, [CLS] and [SEP] among them.

        The answer is a list of vectors, each of as many numbers as the model's hidden states.
        """
        return await self._exchange.ask(requests.TOKEN_FEATURES, inputs, options)

    async def info(self) -> InfoReply:
        """Return the description of the hosted model, and the service's limits.

        That is its name, revision, precision and tasks, with the labels and the quality of each.
        """
        return await self._exchange.send(requests.INFO)

    async def health(self) -> bool:
        """Return whether the service takes requests now; one that is out of reach does not.

        Raises:
            RequestError: it refuses to tell, as for a model that it does not host.
        """
        return await self._exchange.probe() is None

    async def wait_until_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until the service takes requests, as after its start.

        Raises:
            NotReadyError: it does not within `timeout_s`; the message has what was seen last.
            RequestError: it refuses to tell, as for a model that it does not host.
        """
        await self._exchange.wait_until_ready(timeout_s)

    def stream(self, task: str, rows: AnyIterable[Any], **options: Any) -> AsyncAnswerStream:
        """Return the answers to rows of any number, in their order.

        A row is an input of the task, and its answer is what the task's method returns for it. A
        row of "sentence-order" is a pair, or a list of sentences as for `coherence`.

        Args:
            task: the name of an endpoint, such as "fill-mask".
            options: the parameters of the endpoint; `pooling="none"` of "feature-extraction"
                returns the vectors of tokens, as `token_features`.
        """
        return self._exchange.stream(requests.stream_spec(task, options), rows, options)
