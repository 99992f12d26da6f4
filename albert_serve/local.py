"""A bundle in this process behind httpx's interface of a transport, for `AlbertClient.local`.

The service's own validation, tasks and error replies answer, without BentoML, sockets, metrics and
admission control, and no variable of the environment is a setting. They run on an event loop in a
thread of their own, so that one transport is for both clients and for any event loop.
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

# The only callers are in this process, and the client's timeout ends their calls.
_UNLIMITED: Final = 1 << 62
_UNLIMITED_S: Final = 10 * 365 * 86_400.0


class LocalTransport(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """Answers the requests of a client with a bundle. Safe to use from many threads.

    Closing it answers what is in progress, and frees the model.

    Args:
        bundle: its folder, or `bentoml:` and a tag of BentoML's model store; None for the default.
    """

    def __init__(self, bundle: str | os.PathLike[str] | None, options: RuntimeOptions) -> None:
        models = _open(_default() if bundle is None else find_bundle(bundle), options)
        app = make_app(dict)
        app.state.models = models
        self._app: httpx.ASGITransport | None = httpx.ASGITransport(ErrorReplies(app))
        self._process = os.getpid()
        self._lock = threading.Lock()  # nothing is submitted once the loop may have ended
        closing = asyncio.Event()
        # With a factory it leaves the caller's thread without a current event loop.
        runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = runner.get_loop()
        self._thread = threading.Thread(
            target=_run, args=(runner, _until(closing, models)), name="albert-local", daemon=True
        )
        # A client that is forgotten ends its thread, too.
        self._stop = weakref.finalize(self, self._loop.call_soon_threadsafe, closing.set)
        self._stop.atexit = False
        self._thread.start()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Answer a request of the sync client; one that is interrupted is cancelled."""
        answer = self._submit(request)
        try:
            return answer.result(request.extensions["timeout"]["read"])
        except TimeoutError:
            raise httpx.ReadTimeout("no answer in time", request=request) from None
        finally:
            answer.cancel()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answer a request of the async client; one that is cancelled is cancelled here, too."""
        return await asyncio.wrap_future(self._submit(request))

    def close(self) -> None:
        """Answer what is in progress, and free the model; the second call does nothing."""
        if self._process != os.getpid():
            return  # its thread is the parent's
        with self._lock:
            self._app = None
        self._stop()
        self._thread.join()

    async def aclose(self) -> None:
        """Do as `close`, and leave the event loop free meanwhile."""
        await asyncio.to_thread(self.close)

    def _submit(self, request: httpx.Request) -> Future[httpx.Response]:
        if self._process != os.getpid():
            raise ConfigError(
                f"this local model was opened in process {self._process}, of which this one is a "
                "fork, and a fork has no threads of its parent; open a model in each process, "
                "after it has started"
            )
        with self._lock:
            if self._app is None:
                raise httpx.ConnectError("the client is closed", request=request)
            return asyncio.run_coroutine_threadsafe(_answer(self._app, request), self._loop)


def _default() -> Path:
    try:
        return shipped_bundle()
    except ConfigError as error:
        raise ConfigError(
            "this installation has no default model; name a bundle's folder"
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
