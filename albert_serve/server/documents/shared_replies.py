"""Documents that are the same for everybody are made once, and metrics once at a time.

Both take some 10 ms of Python, which everybody waits for: many requests for them must not take many
times as long.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from albert_serve.server.paths import FIXED_PATHS, METRICS_PATH

SHARED_PATHS: Final = FIXED_PATHS | {METRICS_PATH}
_METHODS: Final = ("GET", "HEAD")


@dataclass(slots=True, eq=False)
class _Shared:
    """The replies at a path.

    Attributes:
        num_begun: how often one was made.
        number: of the last that is complete.
        messages: these of that one.
    """

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_begun: int = 0
    number: int = 0
    messages: list[Message] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Whether the last reply may be sent for ever, if it is one that never changes."""
        return bool(self.messages) and self.messages[0].get("status") == HTTPStatus.OK


class SharedReplies:
    """ASGI middleware: callers who wait for the same reply get one that was begun after they came.

    One that never changes is made once.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._shared: dict[tuple[str, str], _Shared] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or send the reply to another one."""
        is_read = scope["type"] == "http" and scope["method"] in _METHODS
        if not is_read or scope["path"] not in SHARED_PATHS:
            await self.app(scope, receive, send)
            return
        shared = self._shared.setdefault((scope["method"], scope["path"]), _Shared())
        num_before = shared.num_begun
        async with shared.lock:
            lasts = scope["path"] in FIXED_PATHS and shared.is_good
            if not lasts and shared.number <= num_before:
                await self._make(shared, scope, receive)
            messages = shared.messages
        for message in messages:
            copy = dict(message)
            if "headers" in copy:  # to which others add
                copy["headers"] = list(copy["headers"])
            await send(copy)

    async def _make(self, shared: _Shared, scope: Scope, receive: Receive) -> None:
        messages: list[Message] = []

        async def keep(message: Message) -> None:
            messages.append(message)

        shared.num_begun += 1
        await self.app(scope, receive, keep)
        shared.number, shared.messages = shared.num_begun, messages
