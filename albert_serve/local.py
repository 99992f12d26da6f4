"""A bundle in this process as a transport of httpx, for `AlbertClient.local`.

Requests use the service's validation, tasks and error replies, without BentoML, sockets, metrics
and admission control. Environment variables are not read. An event loop in a separate thread
answers, so both clients can use a transport, in any event loop.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

import httpx

from albert_serve.bundle.catalog import read_catalogue
from albert_serve.bundle.checkpoint import find_bundle
from albert_serve.bundle.manifest import Bundle
from albert_serve.bundle.store import locate
from albert_serve.errors import ConfigError
from albert_serve.server.errors import ErrorReplies
from albert_serve.server.models import Models
from albert_serve.server.routes import make_app
from albert_serve.settings import RuntimeOptions, Settings, shipped_bundle

# No limits are needed: all callers are in this process, and the client's timeout ends calls.
_UNLIMITED: Final = 1 << 62
_UNLIMITED_S: Final = 10 * 365 * 86_400.0


class LocalTransport(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """A transport that answers a client's requests with a bundle. Threads can share it.

    Closing the transport answers the requests in progress, and frees the model.

    Args:
        bundle: folder of the bundle, or `bentoml:NAME[:VERSION]` (default: the default model).
        options: options of the runtime.
    """

    def __init__(self, bundle: str | os.PathLike[str] | None, options: RuntimeOptions) -> None:
        models = _open(_default() if bundle is None else find_bundle(bundle), options)
        app = make_app(dict)
        app.state.models = models
        self._app: httpx.ASGITransport | None = httpx.ASGITransport(ErrorReplies(app))
        self._process = os.getpid()
        self._lock = threading.Lock()  # so that no request is submitted after the loop ends
        closing = asyncio.Event()
        # With a factory, the runner does not set the current event loop of the caller's thread.
        runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = runner.get_loop()
        self._thread = threading.Thread(
            target=_run, args=(runner, _until(closing, models)), name="albert-local", daemon=True
        )
        # If the client is garbage-collected, its thread ends.
        self._stop = weakref.finalize(self, self._loop.call_soon_threadsafe, closing.set)
        self._stop.atexit = False
        self._thread.start()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Answer a request of the sync client. An interrupt cancels the request."""
        answer = self._submit(request)
        try:
            return answer.result(request.extensions["timeout"]["read"])
        except TimeoutError:
            raise httpx.ReadTimeout("The answer took too long.", request=request) from None
        finally:
            answer.cancel()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answer a request of the async client. Cancelling the caller cancels the request."""
        return await asyncio.wrap_future(self._submit(request))

    def close(self) -> None:
        """Answer the requests in progress, and free the model. A second call does nothing."""
        if self._process != os.getpid():
            return  # the thread belongs to the parent process
        with self._lock:
            self._app = None
        self._stop()
        self._thread.join()

    async def aclose(self) -> None:
        """Close the transport like `close`, without blocking the event loop."""
        await asyncio.to_thread(self.close)

    def _submit(self, request: httpx.Request) -> Future[httpx.Response]:
        if self._process != os.getpid():
            raise ConfigError(
                f"This process is a fork of process {self._process}, which opened this local "
                "model. A fork does not have its parent's threads. Open the model in each process, "
                "after the process has started."
            )
        with self._lock:
            if self._app is None:
                raise httpx.ConnectError("The client is closed.", request=request)
            return asyncio.run_coroutine_threadsafe(_answer(self._app, request), self._loop)


def _default() -> Path:
    try:
        return shipped_bundle()
    except ConfigError as error:
        raise ConfigError(
            "This installation has no default model. Pass the folder of a bundle."
        ) from error


def _open(bundle: Path, options: RuntimeOptions) -> Models:
    settings = Settings.model_construct(bundle=bundle, deadline_s=_UNLIMITED_S)
    [(name, located)] = read_catalogue(settings).bundles.items()
    models = Models(settings)
    model = models.open(name, Bundle.open(locate(located)), options)
    model.limits.large.max_bytes = _UNLIMITED
    model.limits.settings = settings.model_copy(update={"max_queue_tokens": _UNLIMITED})
    models.served, models.default_name = {name: model}, name
    return models


def _run(runner: asyncio.Runner, work: Coroutine[Any, Any, None]) -> None:
    with runner:
        runner.run(work)


async def _until(closing: asyncio.Event, models: Models) -> None:
    await closing.wait()
    await models.close()


async def _answer(app: httpx.ASGITransport, request: httpx.Request) -> httpx.Response:
    response = await app.handle_async_request(request)
    content = await response.aread()
    return httpx.Response(response.status_code, headers=response.headers, content=content)
