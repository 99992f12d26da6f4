"""Servers accept all waiting connections at once, and go on after a client is gone."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Any

import uvicorn
import uvloop

from albert_serve.server.bentoml.event_loop import AcceptingLoop, accept_many

NUM_CLIENTS = 60
RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Echo(asyncio.Protocol):
    """Sends back what it receives; counts its connections."""

    def __init__(self, made: list[Any]) -> None:
        self._made = made

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._made.append(transport)

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


def run(
    check: Callable[[socket.socket, list[Any]], Coroutine[Any, Any, None]],
    factory: Callable[[], asyncio.AbstractEventLoop] = AcceptingLoop,
) -> None:
    """Run a check with a listening socket that a server accepts from."""

    async def serve() -> None:
        made: list[Any] = []
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0), backlog=2 * NUM_CLIENTS) as listener:
            server = await loop.create_server(lambda: Echo(made), sock=listener)
            await check(listener, made)
            server.close()
            for transport in made:
                transport.abort()
            await asyncio.sleep(0.01)

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(serve())


async def num_iterations_to_accept(listener: socket.socket, made: list[Any]) -> int:
    with ExitStack() as clients:
        for _ in range(NUM_CLIENTS):
            clients.enter_context(socket.create_connection(listener.getsockname()))
        num_iterations = 0
        while len(made) < NUM_CLIENTS:
            num_iterations += 1
            await asyncio.sleep(0)
    return num_iterations


def test_waiting_connections_are_accepted_in_a_few_iterations() -> None:
    async def check(listener: socket.socket, made: list[Any]) -> None:
        assert await num_iterations_to_accept(listener, made) < NUM_CLIENTS / 4

    run(check)


def test_uvloop_itself_accepts_one_connection_an_iteration() -> None:
    """Where this fails, `AcceptingLoop` is no longer needed."""

    async def check(listener: socket.socket, made: list[Any]) -> None:
        assert await num_iterations_to_accept(listener, made) >= NUM_CLIENTS - 1

    run(check, uvloop.new_event_loop)


def test_all_accepted_connections_are_served_without_delay() -> None:
    async def check(listener: socket.socket, made: list[Any]) -> None:
        loop = asyncio.get_running_loop()
        with ExitStack() as opened:
            clients = [
                opened.enter_context(socket.create_connection(listener.getsockname()))
                for _ in range(NUM_CLIENTS)
            ]
            for number, client in enumerate(clients):
                client.sendall(b"%d" % number)
                client.setblocking(False)
            async with asyncio.timeout(20):
                replies = [await loop.sock_recv(client, 100) for client in clients]
        assert replies == [b"%d" % number for number in range(NUM_CLIENTS)]
        for transport in made:
            connection = transport.get_extra_info("socket")
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    run(check)


def test_clients_that_reset_their_connections_leave_the_server_running() -> None:
    async def check(listener: socket.socket, made: list[Any]) -> None:
        for _ in range(NUM_CLIENTS):
            client = socket.create_connection(listener.getsockname())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
            client.close()
        await asyncio.sleep(0.1)
        num_before = len(made)
        with socket.create_connection(listener.getsockname()):
            async with asyncio.timeout(20):
                while len(made) == num_before:
                    await asyncio.sleep(0.01)

    run(check)


def test_uvicorn_takes_the_loop(monkeypatch: Any) -> None:
    monkeypatch.setitem(uvicorn.config.LOOP_FACTORIES, "auto", "uvicorn.loops.auto:none")
    accept_many()
    factory = uvicorn.Config(app=lambda: None).get_loop_factory()
    assert factory is not None
    loop = factory()
    loop.close()
    assert isinstance(loop, AcceptingLoop)
