"""The Python client: the service's endpoints as typed methods, for threads and for asyncio.

    with AlbertClient("http://127.0.0.1:3000") as client:
        client.fill_mask("The capital of France is [MASK].", top_k=3)

Needs httpx and pydantic only. The protocol is written once, in `calls.py`; the two clients are
twins that differ in how they wait.
"""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Final, Self, Unpack, overload

import httpx

from albert_serve import calls
from albert_serve.calls import (
    Call,
    FillMaskOptions,
    PairLike,
    PairT,
    QuestionAnsweringOptions,
    QuestionLike,
    QuestionT,
    ReplyT,
    SentenceOrderOptions,
    Server,
    TextClassificationOptions,
    TextLike,
    TextT,
    Tries,
    read_response,
)
from albert_serve.schemas import (
    FillMaskAnswer,
    InfoReply,
    LabelScore,
    Order,
    QuestionAnsweringAnswer,
)

__all__ = ["AlbertClient", "AsyncAlbertClient"]

_TIMEOUT_S: Final = 30.0


class AlbertClient:
    """Calls a service; safe to use from many threads.

    A method takes one input or a list of them, and answers one result or a list. Its options are
    the parameters of the endpoint; one that is left out has the service's default.

    Args:
        base_url: where the service is, such as "http://127.0.0.1:3000".
        api_key: sent as a bearer token.
        timeout_s: how long to wait for a reply; an overloaded service is tried again within it.
        http_client: used in place of an own one; it stays open when this client closes.

    Every method raises:
        InvalidInputError: the inputs or options are refused, by the service or before sending.
        QueueFullError: the service is overloaded, also after trying again.
        NotReadyError: the service cannot be reached, is starting, or is draining.
        DeadlineExceededError: there was no reply in time.
        RequestError: any other refusal, as the subclass that its status has; or a reply that is
            not one of this service.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = _TIMEOUT_S,
        http_client: httpx.Client | None = None,
    ) -> None:
        self._server = Server.at(base_url, api_key, timeout_s)
        self._http = http_client or httpx.Client()
        self._is_own = http_client is None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections, unless they are those of an `http_client` that was given."""
        if self._is_own:
            self._http.close()

    @overload
    def fill_mask(self, inputs: str, **options: Unpack[FillMaskOptions]) -> FillMaskAnswer: ...

    @overload
    def fill_mask(
        self, inputs: list[str], **options: Unpack[FillMaskOptions]
    ) -> list[FillMaskAnswer]: ...

    def fill_mask(
        self, inputs: str | list[str], **options: Unpack[FillMaskOptions]
    ) -> FillMaskAnswer | list[FillMaskAnswer]:
        """The likeliest tokens for the mask; for several masks in a text, a list for each."""
        return self._send(calls.fill_mask(inputs, options))

    @overload
    def text_classification(
        self, inputs: TextLike, **options: Unpack[TextClassificationOptions]
    ) -> list[LabelScore]: ...

    @overload
    def text_classification(
        self, inputs: list[TextT], **options: Unpack[TextClassificationOptions]
    ) -> list[list[LabelScore]]: ...

    def text_classification(
        self, inputs: TextLike | list[TextT], **options: Unpack[TextClassificationOptions]
    ) -> list[LabelScore] | list[list[LabelScore]]:
        """The labels of a text or pair of texts, the best first."""
        return self._send(calls.text_classification(inputs, options))

    @overload
    def question_answering(
        self, inputs: QuestionLike, **options: Unpack[QuestionAnsweringOptions]
    ) -> QuestionAnsweringAnswer: ...

    @overload
    def question_answering(
        self, inputs: list[QuestionT], **options: Unpack[QuestionAnsweringOptions]
    ) -> list[QuestionAnsweringAnswer]: ...

    def question_answering(
        self, inputs: QuestionLike | list[QuestionT], **options: Unpack[QuestionAnsweringOptions]
    ) -> QuestionAnsweringAnswer | list[QuestionAnsweringAnswer]:
        """The answer to a question in a context; a list of them with `top_k` over 1."""
        return self._send(calls.question_answering(inputs, options))

    @overload
    def sentence_order(
        self, inputs: PairLike, **options: Unpack[SentenceOrderOptions]
    ) -> Order: ...

    @overload
    def sentence_order(
        self, inputs: list[PairT], **options: Unpack[SentenceOrderOptions]
    ) -> list[Order]: ...

    def sentence_order(
        self, inputs: PairLike | list[PairT], **options: Unpack[SentenceOrderOptions]
    ) -> Order | list[Order]:
        """The probability that the second text follows the first."""
        return self._send(calls.sentence_order(inputs, options))

    def info(self) -> InfoReply:
        """What the service runs, and what it accepts."""
        return self._send(calls.info())

    def _send(self, call: Call[ReplyT]) -> ReplyT:
        tries = Tries(self._server.timeout_s)
        while True:
            try:
                response = self._http.request(
                    call.method,
                    self._server.base_url + call.path,
                    json=call.body,
                    headers=self._server.headers,
                    timeout=tries.left_s,
                )
            except httpx.HTTPError as error:
                raise self._server.explain(error) from error
            delay_s = tries.delay_s(response)
            if delay_s is None:
                return read_response(call, response)
            time.sleep(delay_s)


class AsyncAlbertClient:
    """`AlbertClient` for asyncio: the same methods, awaited; see there."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = _TIMEOUT_S,
        http_client: httpx.AsyncClient | None = None,
    ) -> None:
        self._server = Server.at(base_url, api_key, timeout_s)
        self._http = http_client or httpx.AsyncClient()
        self._is_own = http_client is None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections, unless they are those of an `http_client` that was given."""
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
        """The likeliest tokens for the mask; for several masks in a text, a list for each."""
        return await self._send(calls.fill_mask(inputs, options))

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
        """The labels of a text or pair of texts, the best first."""
        return await self._send(calls.text_classification(inputs, options))

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
        """The answer to a question in a context; a list of them with `top_k` over 1."""
        return await self._send(calls.question_answering(inputs, options))

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
        """The probability that the second text follows the first."""
        return await self._send(calls.sentence_order(inputs, options))

    async def info(self) -> InfoReply:
        """What the service runs, and what it accepts."""
        return await self._send(calls.info())

    async def _send(self, call: Call[ReplyT]) -> ReplyT:
        tries = Tries(self._server.timeout_s)
        while True:
            try:
                response = await self._http.request(
                    call.method,
                    self._server.base_url + call.path,
                    json=call.body,
                    headers=self._server.headers,
                    timeout=tries.left_s,
                )
            except httpx.HTTPError as error:
                raise self._server.explain(error) from error
            delay_s = tries.delay_s(response)
            if delay_s is None:
                return read_response(call, response)
            await asyncio.sleep(delay_s)
