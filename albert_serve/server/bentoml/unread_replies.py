"""Replies that clients do not read: limited in time and in memory.

uvicorn writes a reply into the connection's buffer, which has no limit, and closes a connection
only when its buffer is empty.
"""

from __future__ import annotations

import asyncio
from typing import Final

MAX_UNREAD_S: Final = 60.0
MAX_UNREAD_BYTES: Final = 1 << 27


class UnreadReplies:
    """The connections of a server whose clients have not read all of a reply yet.

    A client has `MAX_UNREAD_S` to read a reply. If all unread replies together exceed
    `MAX_UNREAD_BYTES`, the oldest connections are ended; a single reply may be larger.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timers: dict[asyncio.Transport, asyncio.TimerHandle] = {}  # the oldest is first

    def watch(self, transport: asyncio.Transport) -> None:
        """End a connection if it still has an unread reply when the time is over."""
        if transport in self._timers or not transport.get_write_buffer_size():
            return
        self._timers[transport] = self._loop.call_later(MAX_UNREAD_S, self._end, transport)
        sizes = {unread: unread.get_write_buffer_size() for unread in self._timers}
        num_bytes = sum(sizes.values())
        for oldest in list(self._timers)[:-1]:
            if num_bytes <= MAX_UNREAD_BYTES:
                return
            num_bytes -= sizes[oldest]
            self._end(oldest)

    def forget(self, transport: asyncio.Transport) -> None:
        """Stop watching a connection, because its client reads, or because it has ended."""
        timer = self._timers.pop(transport, None)
        if timer is not None:
            timer.cancel()

    def _end(self, transport: asyncio.Transport) -> None:
        self.forget(transport)
        if transport.get_write_buffer_size():
            transport.abort()
