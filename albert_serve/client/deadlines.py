"""Deadlines of whole calls for httpx's synchronous client, which has timeouts of single reads only.

A service that sends a byte now and then, in its headers too, or one `100 Continue` after another,
never exceeds the timeout of a read. So each read and write on the network gets the rest of the
call's time as its timeout: httpcore's backends are made for that, but httpx has no option for one.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import httpcore
import httpx

# The end of the current call on `time.monotonic`'s clock.
_ends_s: ContextVar[float | None] = ContextVar("ends_s", default=None)
# httpcore's stream gives its timeout anew to each part that it sends.
_WRITE_BYTES: Final = 1 << 16


@contextmanager
def limited_to(timeout_s: float) -> Iterator[None]:
    """Let reads and writes of the clients that keep deadlines time out when the time is over."""
    token = _ends_s.set(time.monotonic() + timeout_s)
    try:
        yield
    finally:
        _ends_s.reset(token)


def keep_deadlines(http: httpx.Client) -> None:
    """Make a client's new connections keep the deadlines of `limited_to`.

    A client whose transports are not httpx's own stays as it is.
    """
    for transport in (http._transport, *http._mounts.values()):
        pool = getattr(transport, "_pool", None)
        backend = getattr(pool, "_network_backend", None)
        if isinstance(backend, httpcore.NetworkBackend) and not isinstance(backend, _Backend):
            vars(pool)["_network_backend"] = _Backend(backend)


class _Backend(httpcore.NetworkBackend):
    """Opens connections that keep deadlines."""

    def __init__(self, backend: httpcore.NetworkBackend) -> None:
        self._backend = backend

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        left_s = _left_s(timeout, httpcore.ConnectTimeout)
        return _Stream(self._backend.connect_tcp(host, port, left_s, local_address, socket_options))

    def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        left_s = _left_s(timeout, httpcore.ConnectTimeout)
        return _Stream(self._backend.connect_unix_socket(path, left_s, socket_options))

    def sleep(self, seconds: float) -> None:
        self._backend.sleep(seconds)


class _Stream(httpcore.NetworkStream):
    """A connection whose reads and writes end with the call."""

    def __init__(self, stream: httpcore.NetworkStream) -> None:
        self._stream = stream

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, _left_s(timeout, httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        for start in range(0, len(buffer), _WRITE_BYTES):
            part = buffer[start : start + _WRITE_BYTES]
            self._stream.write(part, _left_s(timeout, httpcore.WriteTimeout))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        left_s = _left_s(timeout, httpcore.ConnectTimeout)
        return _Stream(self._stream.start_tls(ssl_context, server_hostname, left_s))

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


def _left_s(timeout: float | None, error: type[Exception]) -> float | None:
    """Return the timeout, or the rest of the call's time if that is less."""
    ends_s = _ends_s.get()
    if ends_s is None:
        return timeout
    left_s = ends_s - time.monotonic()
    if left_s <= 0:
        raise error("the call's time is over")
    return left_s if timeout is None else min(timeout, left_s)
