"""Deadlines and cancellation of whole calls for httpx's synchronous client, which has neither.

A service that sends a byte now and then, in its headers too, or one `100 Continue` after another,
never exceeds the timeout of a read. So each read and write on the network gets the rest of the
call's time as its timeout: httpcore's backends are made for that, but httpx has no option for one.
A call in another thread is cancelled by shutting down the connection that it waits for.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from typing import Any, Final

import httpcore
import httpx

# The end of the current call on `time.monotonic`'s clock.
_ends_s: ContextVar[float | None] = ContextVar("ends_s", default=None)
# That of the current thread's calls.
_cancellation: ContextVar[Cancellation | None] = ContextVar("cancellation", default=None)
# httpcore's stream gives its timeout anew to each part that it sends.
_WRITE_BYTES: Final = 1 << 16


class Cancellation:
    """Cancels the calls of other threads: what waits, and what would begin."""

    def __init__(self) -> None:
        self._is_cancelled = threading.Event()
        self._lock = threading.Lock()
        self._waiting: set[socket.socket] = set()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let the calls of this thread be cancelled, inside `with`."""
        token = _cancellation.set(self)
        try:
            yield
        finally:
            _cancellation.reset(token)

    def cancel(self) -> None:
        """Cancel all calls, now and from now on."""
        with self._lock:
            self._is_cancelled.set()
            for connection in self._waiting:
                with suppress(OSError):
                    # Not of ssl's class, whose method is not for use beside a read.
                    socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def check(self) -> None:
        """Raise CancelledError if the calls are cancelled."""
        if self._is_cancelled.is_set():
            raise CancelledError

    def wait(self, delay_s: float) -> None:
        """Wait, and raise CancelledError as soon as the calls are cancelled."""
        self._is_cancelled.wait(delay_s)
        self.check()

    @contextmanager
    def during(self, stream: httpcore.NetworkStream) -> Iterator[None]:
        """Let a connection be shut down while it is waited for."""
        connection = stream.get_extra_info("socket")
        with self._lock:
            self.check()
            if isinstance(connection, socket.socket):
                self._waiting.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._waiting.discard(connection)


def pause(delay_s: float) -> None:
    """Wait, unless the calls of this thread are cancelled.

    Raises:
        CancelledError: they are.
    """
    cancellation = _cancellation.get()
    if cancellation is None:
        time.sleep(delay_s)
    else:
        cancellation.wait(delay_s)


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
        with _cancellable(self._stream):
            return self._stream.read(max_bytes, _left_s(timeout, httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        for start in range(0, len(buffer), _WRITE_BYTES):
            part = buffer[start : start + _WRITE_BYTES]
            with _cancellable(self._stream):
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


def _cancellable(stream: httpcore.NetworkStream) -> AbstractContextManager[None]:
    cancellation = _cancellation.get()
    return nullcontext() if cancellation is None else cancellation.during(stream)


def _left_s(timeout: float | None, error: type[Exception]) -> float | None:
    """Return the timeout, or the rest of the call's time if that is less."""
    ends_s = _ends_s.get()
    if ends_s is None:
        return timeout
    left_s = ends_s - time.monotonic()
    if left_s <= 0:
        raise error("the call's time is over")
    return left_s if timeout is None else min(timeout, left_s)
