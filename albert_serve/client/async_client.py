"""Python client: the service's endpoints as typed methods.

It needs only httpx and pydantic. `requests.py` defines endpoints and options. `async_exchange.py`
sends requests, splits long lists and retries as `retries.py` decides.
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
    Texts,
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
    """A client of a service for asyncio, on one event loop at a time.

    A method takes one input or a list, and returns one result or a list. A column of a DataFrame
    (pandas, polars) or an array counts as a list. A long list is split into as many requests as the
    service's limits require, several of which are sent concurrently. `stream` answers any number of
    rows.

    A request is retried if the service is overloaded, not ready or unreachable, after the delay
    that the service requests.

    Args:
        base_url: address of the service, such as "http://127.0.0.1:3000" (default: ALBERT_URL).
        model: name of a hosted model (default: the service's default model).
        api_key: bearer token, or "" for none (default: ALBERT_API_KEY, if set).
        timeout_s: time limit of a call in seconds, including all its requests and delays.
        num_retries: maximum number of retries of a request.
        max_concurrency: maximum number of concurrent requests for a list or stream.
        max_reply_bytes: maximum size of a decoded reply; the client stops reading at this size.
        http_client: httpx client to use instead of a new one, which this client does not close.

    Every method raises:
        InvalidInputError: an input or option is invalid, for the service or a check before sending.
        QueueFullError: the service is still overloaded after all retries.
        NotReadyError: the service is unreachable, starting or shutting down.
        DeadlineExceededError: no reply arrived in time.
        RequestError: the service rejected the request for another reason, which the subclass names;
            or the reply is too large, or is not a reply of this service.
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
        """Open a model in this process, with the same methods and answers as a service.

            async with AsyncAlbertClient.local("models/albert-small-en") as albert:
                await albert.fill_mask("Paris is the capital of [MASK].")

        This requires the extra `albert-serve[serve]`. It opens no port, ignores environment
        settings and never rejects a call because of load. `aclose` or the end of `async with` frees
        the model.

        Args:
            bundle: folder of a bundle or a checkpoint, `bentoml:NAME[:VERSION]`, or OWNER/NAME on
                the Hugging Face Hub (default: the default model). A checkpoint is exported first,
                which requires the extra `train`.
            num_threads: number of threads of a run (default: the number of usable CPUs).
            device: "cpu", "cuda", or "auto", which uses CUDA if it works.
            timeout_s: time limit of a call in seconds.

        Raises:
            ConfigError: the extra is not installed, an option is invalid, or there is no default
                model.
            BundleError: the bundle is missing or damaged, or has another format.
            EngineError: the model cannot run here, or not on this device.
        """
        client = cls(
            LOCAL_URL,
            api_key="",
            timeout_s=timeout_s,
            num_retries=0,
            max_reply_bytes=sys.maxsize,
            http_client=httpx.AsyncClient(transport=open_transport(bundle, num_threads, device)),
        )
        client._exchange.is_own = True
        return client

    def __reduce__(self) -> NoReturn:
        raise ConfigError(
            f"A {type(self).__name__} cannot be pickled or copied, because its connections cannot. "
            "Create one in each process, for example in the initializer of a pool."
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
        self, inputs: Texts, **options: Unpack[FillMaskOptions]
    ) -> list[FillMaskAnswer]: ...

    async def fill_mask(self, inputs: Any, **options: Any) -> Any:
        """Return the likeliest tokens for each mask of a text.

        Args:
            inputs: text with [MASK], or a list of texts.

        Keyword Args:
            top_k (int): number of predictions for each mask (default: 5).
            targets (str | list[str]): tokens to choose from (default: the whole vocabulary). If the
                vocabulary lacks a token, its first piece is scored.
            truncation (bool): whether long texts are truncated, not rejected (default: False).

        Returns:
            `FilledToken`s, likeliest first, or one such list per mask if a text has several masks.

        Raises:
            NoMaskError: a text has no mask.
        """
        return await self._exchange.call(requests.FILL_MASK, inputs, options)

    @overload
    async def text_classification(
        self, inputs: TextLike, **options: Unpack[TextClassificationOptions]
    ) -> list[LabelScore]: ...

    @overload
    async def text_classification(
        self, inputs: list[TextT] | Column, **options: Unpack[TextClassificationOptions]
    ) -> list[list[LabelScore]]: ...

    async def text_classification(self, inputs: Any, **options: Any) -> Any:
        """Return the labels of a text or a pair of texts, best first.

        Args:
            inputs: text, `{"text", "text_pair"}` as a dictionary or `TextInput`, or a list.

        Keyword Args:
            top_k (int): number of labels (default: all).
            function_to_apply ("sigmoid" | "softmax" | "none"): function from logits to scores
                (default: by the model's problem type, with the classifier's temperature).
            head (str): name of the classifier, if the model has several (default: the default one).
            truncation (bool): whether long texts are truncated, not rejected (default: False).

        Returns:
            A list of `LabelScore`s for each input.
        """
        return await self._exchange.call(requests.TEXT_CLASSIFICATION, inputs, options)

    @overload
    async def question_answering(
        self, inputs: QuestionLike, **options: Unpack[QuestionAnsweringOptions]
    ) -> QuestionAnsweringAnswer: ...

    @overload
    async def question_answering(
        self, inputs: list[QuestionT], **options: Unpack[QuestionAnsweringOptions]
    ) -> list[QuestionAnsweringAnswer]: ...

    async def question_answering(self, inputs: Any, **options: Any) -> Any:
        """Return the answer to a question in a context of any length.

        Args:
            inputs: `{"question", "context"}` as a dictionary or `QuestionContext`, or a list.

        Keyword Args:
            top_k (int): number of answers (default: 1).
            doc_stride (int): number of tokens that neighbouring windows share (default: 128, or
                fewer if windows are short).
            max_answer_len (int): maximum number of tokens in an answer (default: 15).
            max_question_len (int): number of tokens to which a question is truncated (default:
                unlimited).
            max_seq_len (int): maximum number of tokens in question and window together (default:
                384, or the model's maximum if smaller).
            handle_impossible_answer (bool | None): whether "no answer" competes, as an empty answer
                (default: if the model has a threshold for it).
            null_score_diff_threshold (float): margin by which the logit of "no answer" must exceed
                that of the best answer (default: the model's threshold, otherwise 0).
            align_to_words (bool): whether answers are extended to whole words (default: True).
            truncation (bool): whether long questions are truncated, not rejected (default:
                False).

        Returns:
            An `Answer` for each input, or a list of `Answer`s if `top_k` is more than 1.
        """
        return await self._exchange.call(requests.QUESTION_ANSWERING, inputs, options)

    @overload
    async def sentence_order(
        self, inputs: PairLike, **options: Unpack[SentenceOrderOptions]
    ) -> Order: ...

    @overload
    async def sentence_order(
        self, inputs: list[PairT], **options: Unpack[SentenceOrderOptions]
    ) -> list[Order]: ...

    async def sentence_order(self, inputs: Any, **options: Any) -> Any:
        """Return the probability that the second text follows the first.

        Args:
            inputs: `{"text", "text_pair"}` as a dictionary or `TextPair`, or a list.

        Keyword Args:
            truncation (bool): whether long texts are truncated, not rejected (default: False).

        Returns:
            An `Order` for each input.
        """
        return await self._exchange.call(requests.SENTENCE_ORDER, inputs, options)

    @overload
    async def coherence(
        self, sentences: list[str], **options: Unpack[SentenceOrderOptions]
    ) -> Coherence: ...

    @overload
    async def coherence(
        self, sentences: list[list[str]], **options: Unpack[SentenceOrderOptions]
    ) -> list[Coherence]: ...

    async def coherence(self, sentences: Any, **options: Any) -> Any:
        """Return the coherence of the sentences of a text.

        Args:
            sentences: two or more sentences of a text, or a list of such texts.

        Keyword Args:
            truncation (bool): whether long texts are truncated, not rejected (default: False).

        Returns:
            A `Coherence` for each text: the probability of the order of each neighbouring pair, and
            their geometric mean.
        """
        texts = requests.one_or_more_texts(sentences)
        return await self._exchange.call(requests.COHERENCE, texts, options)

    @overload
    async def zero_shot_classification(
        self, inputs: str, candidate_labels: str | Sequence[str], **options: Unpack[ZeroShotOptions]
    ) -> ZeroShotAnswer: ...

    @overload
    async def zero_shot_classification(
        self,
        inputs: Texts,
        candidate_labels: str | Sequence[str],
        **options: Unpack[ZeroShotOptions],
    ) -> list[ZeroShotAnswer]: ...

    async def zero_shot_classification(
        self, inputs: Any, candidate_labels: str | Sequence[str], **options: Any
    ) -> Any:
        """Return labels that the model was not trained on, best first.

        Args:
            inputs: text, or a list of texts.
            candidate_labels: list of labels, or a text with labels that are separated by commas.

        Keyword Args:
            hypothesis_template (str): sentence about a label, with {} in place of the label
                (default: "This example is {}.").
            multi_label (bool): whether each label is scored by itself, so that the scores do not
                have a sum of 1 (default: False).
            truncation (bool): whether long texts are truncated, not rejected (default: False).

        Returns:
            A list of `LabelScore`s for each input.

        Raises:
            NotFoundError: the model (such as the default model) has no classifier with a label for
                entailment.
        """
        is_text = isinstance(candidate_labels, str)
        labels = candidate_labels if is_text else list(candidate_labels)
        parameters = {**options, "candidate_labels": labels}
        return await self._exchange.call(requests.ZERO_SHOT, inputs, parameters)

    @overload
    async def token_classification(
        self, inputs: str, **options: Unpack[TokenClassificationOptions]
    ) -> TokenClassificationAnswer: ...

    @overload
    async def token_classification(
        self, inputs: Texts, **options: Unpack[TokenClassificationOptions]
    ) -> list[TokenClassificationAnswer]: ...

    async def token_classification(self, inputs: Any, **options: Any) -> Any:
        """Return the entities of a text of any length, in text order.

        Args:
            inputs: text, or a list of texts.

        Keyword Args:
            aggregation_strategy (str): how labels of tokens become entities: "none",
                "simple" (label of each token), or by a word's label: "first" (of its first token),
                "average" (best mean score), "max" (highest score) (default: "first").
            ignore_labels (list[str]): labels that are not returned (default: ["O"]).
            stride (int): number of tokens that neighbouring windows share (default: 128, or fewer
                if windows are short).
            truncation (bool): no effect, because texts of any length are read (default: False).

        Returns:
            `EntityGroup`s for each input, or `ClassifiedToken`s with the strategy "none".

        Raises:
            NotFoundError: the model (such as the default model) has no head for this task.
        """
        return await self._exchange.call(requests.TOKEN_CLASSIFICATION, inputs, options)

    @overload
    async def feature_extraction(
        self, inputs: str, **options: Unpack[FeatureExtractionOptions]
    ) -> Embedding: ...

    @overload
    async def feature_extraction(
        self, inputs: Texts, **options: Unpack[FeatureExtractionOptions]
    ) -> list[Embedding]: ...

    async def feature_extraction(self, inputs: Any, **options: Any) -> Any:
        """Return the embedding of a text.

        If `normalize` is true, the dot product of two embeddings is their cosine similarity.

        Args:
            inputs: text, or a list of texts.

        Keyword Args:
            pooling ("mean" | "cls" | "max"): mean of the token vectors, vector of [CLS], or maximum
                in each dimension (default: the model's, otherwise "mean").
            normalize (bool): whether vectors are scaled to length 1 (default: the model's setting,
                otherwise False).
            truncation (bool): whether long texts are truncated, not rejected (default: False).
            truncate (bool): Hugging Face's name for `truncation` (default: `truncation`).
            truncation_direction ("left" | "right"): end of the text at which tokens are removed
                (default: "right").

        Returns:
            A list of floats for each input, as many as the hidden size.
        """
        return await self._exchange.call(requests.FEATURE_EXTRACTION, inputs, options)

    @overload
    async def token_features(
        self, inputs: str, **options: Unpack[TokenFeaturesOptions]
    ) -> list[Embedding]: ...

    @overload
    async def token_features(
        self, inputs: Texts, **options: Unpack[TokenFeaturesOptions]
    ) -> list[list[Embedding]]: ...

    async def token_features(self, inputs: Any, **options: Any) -> Any:
        """Return the vector of each token of a text, including [CLS] and [SEP].

        Args:
            inputs: text, or a list of texts.

        Keyword Args:
            normalize (bool): whether vectors are scaled to length 1 (default: the model's setting,
                otherwise False).
            truncation (bool): whether long texts are truncated, not rejected (default: False).
            truncate (bool): Hugging Face's name for `truncation` (default: `truncation`).
            truncation_direction ("left" | "right"): end of the text at which tokens are removed
                (default: "right").

        Returns:
            A list of vectors for each input. A vector has as many floats as the hidden size.
        """
        return await self._exchange.call(requests.TOKEN_FEATURES, inputs, options)

    async def info(self) -> InfoReply:
        """Return the description of the model, and the limits of the service.

        The description has the name, revision, precision and tasks, with labels and quality.
        """
        return await self._exchange.send(requests.INFO)

    async def health(self) -> bool:
        """Return whether the service is reachable and accepts requests.

        Raises:
            RequestError: the service rejects the health check, for example for an unknown model.
        """
        return await self._exchange.probe() is None

    async def wait_until_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until the service accepts requests, for example after its start.

        Args:
            timeout_s: time limit in seconds.

        Raises:
            NotReadyError: the service does not accept requests in time. The message has the last
                error.
            RequestError: the service rejects the health check, for example for an unknown model.
        """
        await self._exchange.wait_until_ready(timeout_s)

    def stream(self, task: str, rows: AnyIterable[Any], **options: Any) -> AsyncAnswerStream:
        """Return an iterator over the answers to any number of rows, in their order.

        Args:
            task: name of an endpoint, such as "fill-mask".
            rows: iterable of the task's inputs. For "sentence-order", these are pairs, or lists of
                sentences as for `coherence`.
            options: options of the task's method. With `pooling="none"`, "feature-extraction"
                returns token vectors like `token_features`.

        Returns:
            A stream of the results that the task's method returns for each row.
        """
        return self._exchange.stream(requests.stream_spec(task, options), rows, options)
