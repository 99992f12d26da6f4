"""Both clients of the running service, and of one that gives the responses of a test."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from albert_serve.client import AlbertClient, AsyncAlbertClient
from tests.albert_serve.client.replying import URL, AsyncRunner, Replying, Sent
from tests.albert_serve.support import Running


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module", params=["sync", "async"])
def albert(
    request: pytest.FixtureRequest, service: Running, loop: asyncio.AbstractEventLoop
) -> Iterator[Any]:
    if request.param == "sync":
        with AlbertClient(service.url) as client:
            yield client
    else:
        twin = AsyncAlbertClient(service.url)
        yield AsyncRunner(twin, loop)
        loop.run_until_complete(twin.aclose())


@pytest.fixture(params=["sync", "async"])
def replying(request: pytest.FixtureRequest, loop: asyncio.AbstractEventLoop) -> Replying:
    def make(
        *responses: httpx.Response | Exception, **options: Any
    ) -> tuple[Any, list[httpx.Request]]:
        received: list[httpx.Request] = []
        responses_left = list(responses)

        def handle(request: httpx.Request) -> httpx.Response:
            received.append(request)
            response = responses_left.pop(0)
            if isinstance(response, Exception):
                raise response
            # A response can be sent once.
            headers, sent = dict(response.headers), Sent(response.content)
            return httpx.Response(response.status_code, headers=headers, stream=sent)

        transport = httpx.MockTransport(handle)
        # One request at a time, so that the responses' order is that of the requests.
        shared_options = {"api_key": "secret", "timeout_s": 5.0, "max_concurrency": 1, **options}
        if request.param == "sync":
            return AlbertClient(
                URL, http_client=httpx.Client(transport=transport), **shared_options
            ), received
        twin = AsyncAlbertClient(
            URL, http_client=httpx.AsyncClient(transport=transport), **shared_options
        )
        return AsyncRunner(twin, loop), received

    return make
