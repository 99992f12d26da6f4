"""The service that a client calls: its address and key, or a model in this process.

This is the only module of the client that reads the environment.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import quote

import httpx

from albert_serve.api.schemas import MODEL_PATH
from albert_serve.errors import ConfigError, how_to_install

if TYPE_CHECKING:
    from albert_serve.local import LocalTransport
    from albert_serve.settings import Device

# Not ALBERT_SERVE_..., which are settings of the service: it refuses those that it does not know.
_URL_VARIABLE: Final = "ALBERT_URL"
_KEY_VARIABLE: Final = "ALBERT_API_KEY"

TIMEOUT_S: Final = 30.0
NUM_RETRIES: Final = 2
MAX_CONCURRENCY: Final = 8
READY_TIMEOUT_S: Final = 60.0
# As much as a service's answers may take of its memory (docs/operate.md).
MAX_REPLY_BYTES: Final = 64 << 20
LOCAL_URL: Final = "http://local"
# A day, because a list of any length is one call and no other caller waits.
LOCAL_TIMEOUT_S: Final = 86_400.0
# This is httpx's default.
_MIN_KEPT_CONNECTIONS: Final = 20


_HttpT = TypeVar("_HttpT", httpx.Client, httpx.AsyncClient)


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """The address of a service, and the options of calls.

    Attributes:
        timeout_s: the time limit of a call, with all its retries, waits and parts.
        num_retries: the limit of retries of a request.
        max_concurrency: the limit of requests of a call at once.
        max_reply_bytes: the limit of a reply, decoded.
    """

    base_url: str
    headers: Mapping[str, str]
    timeout_s: float
    num_retries: int
    max_concurrency: int
    max_reply_bytes: int

    def __post_init__(self) -> None:
        if not self.timeout_s > 0:
            raise ConfigError(f"timeout_s is {self.timeout_s}; it must be over 0")
        for name, least in (("num_retries", 0), ("max_concurrency", 1), ("max_reply_bytes", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be {least} or more")

    def open_http(self, client: type[_HttpT]) -> _HttpT:
        """Return a new client of httpx, with as many connections as its callers use at once."""
        num_kept = max(_MIN_KEPT_CONNECTIONS, self.max_concurrency)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=num_kept)
        is_async = issubclass(client, httpx.AsyncClient)
        hooks: dict[str, list[Callable[..., Any]]] = {"request": [_OneLoop()] if is_async else []}
        # No proxy leads to this machine. Over HTTPS the environment may name certificates.
        trusts_env = not _is_loopback(self.base_url)
        try:
            return client(limits=limits, trust_env=trusts_env, event_hooks=hooks)
        except (ImportError, ValueError, httpx.InvalidURL) as error:
            raise ConfigError(
                f"the proxy variables (http_proxy, https_proxy, all_proxy, no_proxy) cannot be "
                f"used: {error}. Correct them, or pass http_client=httpx.{client.__name__}"
                "(trust_env=False)"
            ) from error


class _OneLoop:
    """Refuses requests of an async client from a second event loop: connections are of one."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, request: httpx.Request) -> None:
        loop = asyncio.get_running_loop()
        self._loop = self._loop or loop
        if self._loop is not loop:
            raise ConfigError(
                "this AsyncAlbertClient was used on another event loop; make one in each "
                "(`async with AsyncAlbertClient(...)` within asyncio.run), or use AlbertClient"
            )


def service_url(base_url: str | None, model: str | None) -> str:
    """Return the URL of a service, or of one model of it.

    Args:
        base_url: None for that of the environment.
    """
    name, url = "base_url", base_url
    if url is None:
        name, url = _URL_VARIABLE, _variable(_URL_VARIABLE)
    if url is None:
        raise ConfigError(
            f'there is no address; pass base_url, such as "http://127.0.0.1:3000", or set '
            f"{_URL_VARIABLE}"
        )
    if not url.startswith(("http://", "https://")) or not _host(url):
        raise ConfigError(
            f"{name} is {url!r}; it must begin with http:// or https://, and a host, "
            'such as "http://127.0.0.1:3000"'
        )
    path = "" if model is None else MODEL_PATH.format(model=quote(model, safe=""))
    return url.rstrip("/") + path


def authorization(api_key: str | None) -> dict[str, str]:
    """Return the header with a key.

    Args:
        api_key: None for that of the environment, if it has one; "" for none.
    """
    name, key = "api_key", api_key
    if key is None:
        name, key = _KEY_VARIABLE, _variable(_KEY_VARIABLE)
    if not key:
        return {}
    if not (key.isascii() and key.isprintable() and key == key.strip()):
        raise ConfigError(
            f"{name} begins or ends with a space, or holds characters that no header can have; "
            "is it whole?"
        )
    return {"Authorization": f"Bearer {key}"}


def open_transport(
    bundle: str | os.PathLike[str] | None, num_threads: int | None, device: Device
) -> LocalTransport:
    """Open a bundle in this process. No other function of the client imports the serving stack."""
    try:
        from albert_serve.local import LocalTransport
        from albert_serve.settings import RuntimeOptions
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error.name} is not installed, which a local model needs: {how_to_install('serve')}"
        ) from error
    return LocalTransport(bundle, RuntimeOptions(device=device, num_threads=num_threads))


def _variable(name: str) -> str | None:
    """Return a variable of the environment; None if it is not set, or blank."""
    return os.environ.get(name, "").strip() or None


def _is_loopback(url: str) -> bool:
    """Whether a URL is of HTTP on this machine."""
    host = _host(url)
    if not url.startswith("http://"):
        return False
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _host(url: str) -> str:
    try:
        return httpx.URL(url).host
    except httpx.InvalidURL:
        return ""
