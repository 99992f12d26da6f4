"""One reply for all who wait for the same one, made after they came."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from albert_serve.server.documents.shared_replies import SharedReplies


class Numbering:
    """An application that replies with how often it was asked, when it is let."""

    def __init__(self, status: int = 200) -> None:
        self.num_calls = 0
        self.status = status
        self.may_reply = asyncio.Event()

    async def __call__(self, _scope: Any, _receive: Any, send: Any) -> None:
        self.num_calls += 1
        body = str(self.num_calls).encode()
        await self.may_reply.wait()
        headers = [(b"content-length", str(len(body)).encode())]
        start = {"type": "http.response.start", "status": self.status, "headers": headers}
        await send(start)
        await send({"type": "http.response.body", "body": body})


def client_of(app: Numbering) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(SharedReplies(app))
    return httpx.AsyncClient(transport=transport, base_url="http://here")


async def texts(*replies: Any) -> list[str]:
    return [reply.text for reply in await asyncio.gather(*replies)]


def test_those_who_wait_get_one_reply_that_was_made_after_they_came() -> None:
    async def run() -> None:
        app = Numbering()
        async with client_of(app) as client:
            first = asyncio.ensure_future(client.get("/metrics"))
            while not app.num_calls:
                await asyncio.sleep(0)
            later = [asyncio.ensure_future(client.get("/metrics")) for _ in range(5)]
            await asyncio.sleep(0.01)
            assert app.num_calls == 1
            app.may_reply.set()
            assert await texts(first, *later) == ["1", *["2"] * 5]
            assert await texts(client.get("/metrics")) == ["3"]

    asyncio.run(run())


def test_what_never_changes_is_made_once_but_a_failure_is_not_kept() -> None:
    async def run() -> None:
        app = Numbering(status=503)
        app.may_reply.set()
        async with client_of(app) as client:
            assert await texts(client.get("/docs.json")) == ["1"]
            app.status = 200
            for _ in range(3):
                assert await texts(client.get("/docs.json")) == ["2"]
            assert await texts(client.get("/schema.json")) == ["3"]

    asyncio.run(run())


def test_other_requests_are_passed_on() -> None:
    async def run() -> None:
        app = Numbering()
        app.may_reply.set()
        async with client_of(app) as client:
            asked = [client.post("/metrics"), client.get("/info"), client.get("/info")]
            assert sorted(await texts(*asked)) == ["1", "2", "3"]

    asyncio.run(run())
