"""Rows of a stream: what is sent together, and how a refused row is left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

from pydantic import BaseModel

from albert_serve.client.calls import Call
from albert_serve.client.requests import Endpoint
from albert_serve.errors import InvalidInputError, RequestError

# Enough that a request's own cost is small beside that of its rows.
ROWS_PER_REQUEST: Final = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Rows that follow each other, from the index `start` on.

    Attributes:
        error: that of the caller's iterator, in place of further rows.
    """

    endpoint: Endpoint[Any]
    options: Mapping[str, Any]
    start: int = 0
    rows: list[Any] = field(default_factory=list)
    error: Exception | None = None

    def call(self) -> Call[list[Any]]:
        """Return the call to make.

        Raises:
            InvalidInputError: the service would refuse a row or an option.
        """
        return self.endpoint.call(self.rows, self.options, start=self.start)

    def following(self) -> Self:
        """Return the batch of the rows after these, which has none yet."""
        return replace(self, start=self.start + len(self.rows), rows=[])

    def without(self, error: RequestError) -> tuple[Self, Self]:
        """Return the rows before the one that is refused, and those after it.

        Raises:
            RequestError: the error itself, if it is not about one of these rows.
        """
        index = error.input_index
        if index is None or not self.start <= index < self.start + len(self.rows):
            raise error
        place = index - self.start
        before = replace(self, rows=self.rows[:place])
        return before, replace(self, start=index + 1, rows=self.rows[place + 1 :])


def check_rows(rows: object, kinds: tuple[type, ...]) -> None:
    """Refuse what is one input, or no iterable of one of these kinds.

    Raises:
        InvalidInputError: it is.
    """
    if isinstance(rows, str | bytes | Mapping | BaseModel) or not isinstance(rows, kinds):
        raise InvalidInputError(
            f"rows is of the type {type(rows).__name__}; it must be an iterable of inputs, such as "
            "a list or a generator"
        )
