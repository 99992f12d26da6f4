"""The answers of a stream, as an iterator."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Self, TypeVar

from albert_serve.errors import RequestError

_AnswerT = TypeVar("_AnswerT", covariant=True)


class AsyncAnswerStream(AsyncIterator[_AnswerT]):
    """The answers to rows, in the order of the rows.

    Rows are read as answers are taken: about 500 ahead, in requests of up to 32, so that memory
    does not grow with their number. An error of the rows' iterator is raised after the answers to
    the rows before it. After the end of `async with`, or `aclose`, no other request is sent.

    A row that is refused raises its error, and ends the stream; `with_errors` goes on instead. In
    both, `error.input_index` is the row's index. What is no fault of a row always ends the stream:
    a service that is overloaded or out of reach, also after all retries, a wrong key or option.
    """

    def __init__(self, results: AsyncGenerator[_AnswerT | RequestError, None]) -> None:
        self._results = results

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> _AnswerT:
        result = await anext(self._results)
        if isinstance(result, RequestError):
            await self.aclose()
            raise result
        return result

    def with_errors(self) -> AsyncGenerator[_AnswerT | RequestError, None]:
        """Return the stream with the error of a refused row in place of its answer."""
        return self._results

    async def aclose(self) -> None:
        """End the stream; there are no answers afterwards."""
        await self._results.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
