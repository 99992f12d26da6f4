"""Rows of any number as a stream: what is sent together, and how a refused row is found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from pydantic import BaseModel

from albert_serve.api.schemas import InfoReply
from albert_serve.client.calls import Call, renumbered
from albert_serve.client.replies import with_message
from albert_serve.client.transport import Conversation, Exchange, Progress
from albert_serve.errors import BodyTooLargeError, InvalidInputError, RequestError

# Enough that a request's own cost is small beside that of its rows.
ROWS_PER_REQUEST: Final = 32
# Requests that are read ahead, for each that is sent at once: so many answers may wait for an
# earlier one.
REQUESTS_AHEAD: Final = 2

# Makes a call of a list of rows.
Build: TypeAlias = Callable[[list[Any]], Call[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Rows that follow each other, from `start` on."""

    start: int
    rows: list[Any]

    def split(self, index: int) -> tuple[Batch, Batch]:
        """Return the rows before the one of an index, and those after it."""
        place = index - self.start
        after = Batch(start=index + 1, rows=self.rows[place + 1 :])
        return Batch(start=self.start, rows=self.rows[:place]), after


@dataclass(frozen=True, kw_only=True, slots=True)
class RowStream:
    """The conversations of a stream.

    Attributes:
        limits: the service's; None if it does not tell them.
    """

    exchange: Exchange
    build: Build
    limits: InfoReply | None
    progress: Progress

    def answer(self, batch: Batch) -> Conversation[list[Any]]:
        """Get an answer to each row; a row that is refused has its error in place of one.

        Raises:
            RequestError: the service refuses for another reason than a row, or an option is wrong.
        """
        results: list[Any] = []
        while batch.rows:
            try:
                return [*results, *(yield from self._send(batch))]
            except (InvalidInputError, BodyTooLargeError) as error:
                index = error.input_index
                if index is None or not 0 <= index - batch.start < len(batch.rows):
                    raise
                before, batch = batch.split(index)
                refused = _without_trace(error)
            results += [*(yield from self.answer(before)), refused]
        return results

    def _send(self, batch: Batch) -> Conversation[list[Any]]:
        try:
            call = self.build(batch.rows)
        except InvalidInputError as error:
            raise with_message(error, renumbered(str(error), batch.start)) from None
        call = replace(call, start=batch.start)
        return (yield from self.exchange.converse_in_turn(call, self.limits, self.progress))


def check_rows(rows: object, *kinds: type) -> None:
    """Refuse what is one input, or no iterable of one of these kinds.

    Raises:
        InvalidInputError: it is.
    """
    if isinstance(rows, str | bytes | Mapping | BaseModel) or not isinstance(rows, kinds):
        raise InvalidInputError(
            f"rows is of the type {type(rows).__name__}; it must be an iterable of inputs, such as "
            "a list or a generator"
        )


def _without_trace(error: RequestError) -> RequestError:
    """Return the error without what it would keep in memory."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
