"""The names by which the service may be called.

A page of any site can have its own name resolved to this machine (DNS rebinding). To the browser
the service is then of the page's origin, so that CORS does not hold, and only the header `Host`
tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from albert_serve.errors import MalformedRequestError
from albert_serve.server.error_replies import error_response
from albert_serve.server.paths import HEALTH_PATHS
from albert_serve.settings import HOSTS_VARIABLE


class AllowedHosts:
    """ASGI middleware that answers 400 to requests for another host, except health checks.

    Args:
        hosts: names and addresses; `*.example.com` is every name that ends so.
    """

    def __init__(self, app: ASGIApp, *, hosts: Sequence[str]) -> None:
        self.app = app
        self._hosts = [host.lower().strip("[]") for host in hosts]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it before any of its body is read."""
        if scope["type"] != "http" or scope["path"] in HEALTH_PATHS:
            await self.app(scope, receive, send)
            return
        host = Headers(scope=scope).get("host", "")
        if self._allows(host):
            await self.app(scope, receive, send)
            return
        error = MalformedRequestError(
            f"the service does not accept the host {host[:80]!r}. Allowed are "
            f"{', '.join(self._hosts)}. Set {HOSTS_VARIABLE} to allow others."
        )
        await error_response(error, scope)(scope, receive, send)

    def _allows(self, host: str) -> bool:
        try:
            host = urlsplit(f"//{host}").hostname or ""
        except ValueError:  # brackets without an address
            return False
        return any(
            host == allowed or (allowed.startswith("*.") and host.endswith(allowed[1:]))
            for allowed in self._hosts
        )
