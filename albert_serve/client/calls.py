"""A call: one request, the parser of its reply, and the parts that its list is sent in."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final, Generic, TypeVar

from albert_serve.api.schemas import InfoReply, num_items_of

ReplyT = TypeVar("ReplyT")

# At the beginning of each sentence of a message, and of a place in a header.
_ITEM_INDEX: Final = re.compile(r"(?:^|(?<=; ))(inputs)\[(\d{1,18})\]")
_PLACE_INDEX: Final = re.compile(r'("inputs)\[(\d{1,18})\]')


@dataclass(frozen=True, kw_only=True, slots=True)
class Call(Generic[ReplyT]):
    """One request, and the parser of its reply.

    Attributes:
        start: the index of its first item in the caller's list.
    """

    method: str
    path: str
    body: dict[str, Any] | None
    read: Callable[[bytes], ReplyT]
    start: int = 0

    @property
    def num_items(self) -> int:
        """The number of items in its list; 1 without a list."""
        return len(self._items) or 1

    @property
    def has_list(self) -> bool:
        """Whether it asks about a list, and so is answered with one."""
        return isinstance((self.body or {}).get("inputs"), list)

    @property
    def _items(self) -> list[Any]:
        items: list[Any] = (self.body or {})["inputs"] if self.has_list else []
        return items

    def parts(self, limits: InfoReply) -> list[Call[ReplyT]]:
        """Split the list into calls within the limits of items and bytes.

        An item that exceeds a limit by itself is sent alone.
        """
        num_free = limits.max_body_bytes - _num_bytes({**(self.body or {}), "inputs": []})
        starts = [0]
        num_used = num_items = 0
        for index, item in enumerate(self._items):
            num_more = _num_bytes(item) + 1  # and a comma
            counted = num_items_of(item)
            is_full = num_items + counted > limits.max_items or num_used + num_more > num_free
            if index > starts[-1] and is_full:
                starts.append(index)
                num_used = num_items = 0
            num_used += num_more
            num_items += counted
        return [self._part(start, end) for start, end in pairwise([*starts, self.num_items])]

    def halves(self) -> list[Call[ReplyT]]:
        """Split the list into two calls."""
        middle = len(self._items) // 2
        return [self._part(0, middle), self._part(middle, self.num_items)]

    def _part(self, start: int, end: int) -> Call[ReplyT]:
        body = {**(self.body or {}), "inputs": self._items[start:end]}
        return replace(self, body=body, start=self.start + start)


def _num_bytes(value: object) -> int:
    """Return the length of a value as httpx serialises it, or a little more."""
    return len(json.dumps(value, ensure_ascii=False).encode())


def renumbered(message: str, num_before: int) -> str:
    """Return a message about an item with the item's index in the whole list."""
    return _renumbered(_ITEM_INDEX, message, num_before)


def renumbered_places(places: str, num_before: int) -> str:
    """Return the header of cuts with the texts' indices in the whole list."""
    return _renumbered(_PLACE_INDEX, places, num_before)


def _renumbered(pattern: re.Pattern[str], text: str, num_before: int) -> str:
    return pattern.sub(lambda match: f"{match[1]}[{int(match[2]) + num_before}]", text)
