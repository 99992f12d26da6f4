# Generated from async_streams.py by scripts/unasync.py; `make client` writes it.
"""The answers of a stream, as an iterator."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Self, TypeVar

from albert_serve.errors import RequestError

_AnswerT = TypeVar("_AnswerT", covariant=True)


class AnswerStream(Iterator[_AnswerT]):
    """The answers to rows, in the order of the rows.

    Rows are read as answers are taken: about 500 ahead, in requests of up to 32, so that memory
    does not grow with their number. An error of the rows' iterator is raised after the answers to
    the rows before it. After the end of `with`, or `close`, no other request is sent.

    A row that is refused raises its error, and ends the stream; `with_errors` goes on instead. In
    both, `error.input_index` is the row's index. What is no fault of a row always ends the stream:
    a service that is overloaded or out of reach, also after all retries, a wrong key or option.
    """

    def __init__(self, results: Generator[_AnswerT | RequestError, None, None]) -> None:
        self._results = results

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> _AnswerT:
        result = next(self._results)
        if isinstance(result, RequestError):
            self.close()
            raise result
        return result

    def with_errors(self) -> Generator[_AnswerT | RequestError, None, None]:
        """Return the stream with the error of a refused row in place of its answer."""
        return self._results

    def close(self) -> None:
        """End the stream; there are no answers afterwards."""
        self._results.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
