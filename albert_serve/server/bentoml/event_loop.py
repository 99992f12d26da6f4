"""An event loop that accepts all waiting connections at once.

uvloop accepts one connection in each of its iterations (libuv/libuv#3696). Under overload an
iteration takes tens of milliseconds, so that the last of 512 clients that connect together waits
for seconds before anything of its request is read. asyncio's own loop accepts as many as its
backlog in an iteration, but takes more time for everything else.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Final

import uvicorn.config
import uvloop

# Not all that wait, because several workers share the listening socket.
_MAX_ACCEPTED: Final = 64


def accept_many() -> None:
    """Make the servers that this process starts use `AcceptingLoop`."""
    uvicorn.config.LOOP_FACTORIES["auto"] = f"{__name__}:{loop_factory.__name__}"


def loop_factory(use_subprocess: bool = False) -> Callable[[], asyncio.AbstractEventLoop]:
    """Return the factory of event loops, as uvicorn asks for it."""
    del use_subprocess
    return AcceptingLoop


class AcceptingLoop(uvloop.Loop):
    """uvloop, whose servers accept up to 64 more connections when they have accepted one."""

    def __init__(self) -> None:
        super().__init__()
        self._connecting: set[asyncio.Task[None]] = set()

    async def create_server(  # type: ignore[override]
        self,
        protocol_factory: Callable[[], asyncio.Protocol],
        *args: Any,
        sock: socket.socket | None = None,
        ssl: Any = None,
        **options: Any,
    ) -> asyncio.AbstractServer:
        """Create a server; only one of a listening socket accepts many connections at once."""

        def accept() -> asyncio.Protocol:
            if sock is not None:
                self.call_soon(self._accept_waiting, sock, protocol_factory, ssl)
            return protocol_factory()

        return await super().create_server(accept, *args, sock=sock, ssl=ssl, **options)

    def _accept_waiting(
        self, listener: socket.socket, protocol_factory: Callable[[], asyncio.Protocol], ssl: Any
    ) -> None:
        for _ in range(_MAX_ACCEPTED):
            try:
                connection, _ = listener.accept()
            except OSError:  # none waits, or the listener is closed; uvloop reports other failures
                return
            connection.setblocking(False)
            connecting = self.create_task(self._connect(connection, protocol_factory, ssl))
            self._connecting.add(connecting)
            connecting.add_done_callback(self._connecting.discard)

    async def _connect(
        self, connection: socket.socket, protocol_factory: Callable[[], asyncio.Protocol], ssl: Any
    ) -> None:
        try:
            await self.connect_accepted_socket(protocol_factory, connection, ssl=ssl)
        except OSError:  # the client is gone, or its TLS handshake failed
            connection.close()
