"""The BentoML service: `bentoml serve albert_serve.service:AlbertServe`.

BentoML is the shell: processes, `/livez`, `/readyz`, `/metrics`, packaging. What the service
answers is in `endpoints.py`, which is mounted here; how errors look is in `envelope.py`; who may
ask is in `access.py`.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from typing import Any, Final

import bentoml
from _bentoml_sdk import Service
from starlette.middleware.cors import CORSMiddleware

from albert_serve.access import ApiKeys, Guard, cors_options
from albert_serve.batcher import Batcher
from albert_serve.bundle import Bundle
from albert_serve.endpoints import Backend, make_app
from albert_serve.engine import Engine
from albert_serve.envelope import Envelope
from albert_serve.errors import AlbertServeError
from albert_serve.logs import configure_logs
from albert_serve.metrics import PrometheusObserver
from albert_serve.openapi import describe_service
from albert_serve.runtime import check_runtime
from albert_serve.settings import Settings, num_workers
from albert_serve.surfaces import Labels, Paths
from albert_serve.tasks.load import load_tasks

# BentoML ends a request after this; our deadlines are shorter, and say why (settings.py).
_BENTOML_TIMEOUT_S: Final = 60


_app = make_app(lambda: describe_service(AlbertServe.openapi_spec.asdict()))


class Serving:
    """ALBERT: fill-mask, text classification, question answering and sentence order."""

    def __init__(self) -> None:
        settings = Settings.from_environment()
        bundle = Bundle.open(settings.bundle)
        self._engine = Engine.open(bundle, settings.runtime)
        if settings.max_batch_tokens is not None:
            self._engine.max_batch_tokens = settings.max_batch_tokens
        tasks = load_tasks(bundle)
        self._backend = Backend(
            settings=settings,
            bundle=bundle,
            tasks=tasks,
            batcher=Batcher(
                self._engine,
                max_queue_tokens=settings.max_queue_tokens,
                call_cost_tokens=self._engine.call_cost_tokens,
                observer=PrometheusObserver(
                    bundle.folder.resolve().name, bundle.manifest.precision, tasks
                ),
            ),
        )

    @bentoml.on_deployment  # type: ignore[untyped-decorator]
    @staticmethod
    def check() -> None:
        """Before any process starts: see that there is a bundle to serve, and that it is whole."""
        try:
            check_runtime()
            settings = Settings.from_environment()
            configure_logs(settings.log_format)
            if settings.has_keys:
                _read_keys(settings)
            Bundle.open(settings.bundle)
        except AlbertServeError as error:
            raise SystemExit(f"error: {error}") from error

    @bentoml.on_startup  # type: ignore[untyped-decorator]
    async def start(self) -> None:
        """Warm up, then take requests."""
        await asyncio.to_thread(self._engine.warm_up)
        self._end_with_grace()
        _app.state.backend = self._backend

    @bentoml.on_shutdown  # type: ignore[untyped-decorator]
    async def stop(self) -> None:
        """Finish what was accepted."""
        self._backend.accepting = False
        await self._backend.batcher.close()

    def __is_ready__(self) -> bool:
        return _app.state.backend is not None and self._backend.accepting

    def _end_with_grace(self) -> None:
        """On SIGTERM be not ready at once, and for the grace period still answer."""
        if threading.current_thread() is not threading.main_thread():
            return  # a test's server; signals go to the main thread
        server_ends = signal.getsignal(signal.SIGTERM)
        loop = asyncio.get_running_loop()

        def end() -> None:
            self._backend.accepting = False
            if callable(server_ends):
                grace_s = self._backend.settings.drain_grace_s
                loop.call_later(grace_s, server_ends, signal.SIGTERM, None)

        loop.add_signal_handler(signal.SIGTERM, end)


class _Shell(Service[Serving]):  # type: ignore[misc]
    """BentoML's service with our middleware around it, and inside of it."""

    def to_asgi(self, is_main: bool = True) -> Any:
        """The application of a process; it is asked for once, before the first request."""
        settings = Settings.from_environment()
        configure_logs(settings.log_format)
        self.add_asgi_middleware(Paths)
        self.add_asgi_middleware(Envelope)
        if settings.cors_origins:
            self.add_asgi_middleware(CORSMiddleware, **cors_options(settings))
        if settings.has_keys:
            keys = _read_keys(settings)
            self.add_asgi_middleware(Guard, keys=keys, surfaces=settings.guard)
        app = super().to_asgi(is_main=is_main)
        app.add_middleware(Labels)
        return app


def _read_keys(settings: Settings) -> ApiKeys:
    return ApiKeys(settings.api_keys, settings.api_keys_file)


AlbertServe: Any = bentoml.service(
    name="albert_serve",
    service_class=_Shell,
    traffic={"timeout": _BENTOML_TIMEOUT_S},
    workers=num_workers(),
    logging={"access": {"enabled": False}},  # ours has the request's id (envelope.py)
)(Serving)
AlbertServe.mount_asgi_app(_app)
