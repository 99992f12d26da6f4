"""The BentoML service: `bentoml serve albert_serve.service:AlbertServe`.

The routes of `server/routes.py` answer HTTP requests. The endpoints of the default model are also
methods, for BentoML's clients and for services that compose this one with
`bentoml.depends(AlbertServe)`.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from functools import cache
from typing import Any, Final

import bentoml
import click
from starlette.applications import Starlette

from albert_serve.api.schemas import InfoReply
from albert_serve.errors import AlbertServeError, printable
from albert_serve.server.auth import read_keys
from albert_serve.server.bentoml.endpoints import Info, endpoint
from albert_serve.server.bentoml.http import limit_connections
from albert_serve.server.bentoml.middleware import order_middleware
from albert_serve.server.bentoml.supervision import SERVICE_NAME, end_worker, supervise
from albert_serve.server.errors import EXCEPTION_HANDLERS
from albert_serve.server.limits import Limits
from albert_serve.server.logging import configure_logs
from albert_serve.server.metrics import Metrics, reserve_files
from albert_serve.server.models import Models, check_models
from albert_serve.server.openapi import describe_service
from albert_serve.server.paths import RequestTarget
from albert_serve.server.routes import make_app
from albert_serve.settings import (
    DEFAULT_VARIABLE,
    HOSTS_VARIABLE,
    LOOPBACK_HOSTS,
    Settings,
    metrics_folder,
    num_workers,
)

# BentoML's clients give up after this time. Our deadlines are shorter, so that a client gets a
# reply with the reason.
_BENTOML_TIMEOUT_S: Final = 60
_app = make_app(lambda: describe_service(AlbertServe.openapi_spec.asdict()))
_metrics = cache(Metrics)  # a process has only one, even with several instances of the service


class Serving:
    """ALBERT: fill-mask, classification, question answering, order, entities, embeddings."""

    def __init__(self) -> None:
        try:
            self._models = Models.load(Settings.from_environment(), _metrics())
        except AlbertServeError as error:
            end_worker(error)
            raise

    fill_mask = endpoint("fill-mask")
    text_classification = endpoint("text-classification")
    question_answering = endpoint("question-answering")
    sentence_order = endpoint("sentence-order")
    token_classification = endpoint("token-classification")
    feature_extraction = endpoint("feature-extraction")

    @bentoml.api(route="/info", output_spec=Info)  # type: ignore[untyped-decorator]
    async def info(self) -> InfoReply:
        """Describe the model and the service's limits."""
        return self.hosted.default.description

    @bentoml.on_deployment  # type: ignore[untyped-decorator]
    @staticmethod
    def check() -> None:
        """Check the settings and bundles before any process starts."""
        try:
            settings = Settings.from_environment()
            configure_logs(settings.log_format)
            if settings.has_keys:
                read_keys(settings.api_keys, settings.api_keys_file)
            if not settings.needs_key and not settings.allowed_hosts and _listens_on_loopback():
                os.environ[HOSTS_VARIABLE] = ",".join(LOOPBACK_HOSTS)
            # If the folder of bundles changes, workers that start later use the same default model.
            os.environ[DEFAULT_VARIABLE] = check_models(settings)
            supervise()
        except AlbertServeError as error:
            raise SystemExit(f"error: {printable(str(error))}") from error

    @bentoml.on_startup  # type: ignore[untyped-decorator]
    async def start(self) -> None:
        """Start hosting the models."""
        _app.state.models = self.hosted
        # Tests run the server in another thread, where no signal handler can be set.
        if threading.current_thread() is threading.main_thread():
            self._drain_on_sigterm()
            # A full garbage collection stops all requests, so it skips the objects that exist now.
            gc.collect()
            gc.freeze()

    @bentoml.on_shutdown  # type: ignore[untyped-decorator]
    async def close(self) -> None:
        """Answer the accepted requests, then close the models, also for a composing service."""
        await self._models.close()

    def __is_ready__(self) -> bool:
        return _app.state.models is not None and self._models.accepting

    @property
    def hosted(self) -> Models:
        """The models. They start here within a composing service, which calls no startup hook."""
        self._models.start()
        return self._models

    def _drain_on_sigterm(self) -> None:
        """Become unready on SIGTERM, but answer until the grace period ends."""
        server_handler = signal.getsignal(signal.SIGTERM)
        loop = asyncio.get_running_loop()

        def end() -> None:
            self._models.accepting = False
            if callable(server_handler):
                grace_s = self._models.settings.drain_grace_s
                loop.call_later(grace_s, server_handler, signal.SIGTERM, None)

        loop.add_signal_handler(signal.SIGTERM, end)


class _ServiceWithMiddleware(bentoml.Service[Serving]):  # type: ignore[misc]
    """BentoML's service with our middleware and routes."""

    def to_asgi(self, is_main: bool = True) -> Any:
        """Return a process's application. BentoML calls this once, before the first request."""
        settings = Settings.from_environment()
        configure_logs(settings.log_format)
        limit_connections()
        self.inject_config()
        folder = metrics_folder()
        if folder is not None and not reserve_files(folder):
            self.config["metrics"] = {"enabled": False}
        app = super().to_asgi(is_main=is_main)
        app.user_middleware = order_middleware(
            app.user_middleware, settings, _find_limits, is_main=is_main
        )
        if is_main:
            self._add_our_routes(app)
            app.exception_handlers.update(EXCEPTION_HANDLERS)
        return app

    def _add_our_routes(self, app: Starlette) -> None:
        """Replace BentoML's routes of the endpoints by the routes of `server/routes.py`.

        BentoML would read a body of any size and content type, for any time, and reject invalid
        bodies with another status and format. The routes are not mounted, because every request
        would pass through a second application.
        """
        endpoints = {method.route for method in self.apis.values()}
        other_routes = [
            route for route in app.router.routes if getattr(route, "path", None) not in endpoints
        ]
        app.router.routes = [*_app.routes, *other_routes]
        app.state = _app.state


def _find_limits(target: RequestTarget) -> tuple[Limits, str] | None:
    models: Models | None = _app.state.models
    return None if models is None else models.find(target)


def _listens_on_loopback() -> bool:
    """Return whether the options of `bentoml serve` let only this machine reach the service.

    BentoML does not pass its options to hooks. A service that Python code starts has no options.
    """
    context = click.get_current_context(silent=True)
    host = context.params.get("host") if context is not None else None
    return isinstance(host, str) and (host == "::1" or host.startswith("127."))


AlbertServe: Any = bentoml.service(
    name=SERVICE_NAME,
    service_class=_ServiceWithMiddleware,
    traffic={"timeout": _BENTOML_TIMEOUT_S},
    workers=num_workers(),
    logging={"access": {"enabled": False}},  # our access log has the request's id (errors.py)
)(Serving)
