"""Both clients behind one interface, and a service that gives the responses of a test in turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx

from albert_serve.client import AsyncAlbertClient

URL = "http://service.test"


class AsyncRunner:
    """Calls the asynchronous twin as if it were the other, so that one test serves both."""

    def __init__(self, client: AsyncAlbertClient, loop: asyncio.AbstractEventLoop) -> None:
        self._client = client
        self._loop = loop

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._client, name)

        def run(*args: Any, **options: Any) -> Any:
            return self._loop.run_until_complete(method(*args, **options))

        return run


class Sent(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body on its way, for either twin."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def __iter__(self) -> Iterator[bytes]:
        yield self._content

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._content


# Makes a client of a service that gives these responses in turn; and tells the requests it got.
Replying = Callable[..., tuple[Any, list[httpx.Request]]]


def refusal(status: int, error_type: str, **headers: str) -> httpx.Response:
    body = {"error": "no", "error_type": error_type, "request_id": "r1"}
    return httpx.Response(status, json=body, headers=headers)
