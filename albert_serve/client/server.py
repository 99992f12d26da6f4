"""The service that a client calls: its address and key, or a model in this process.

Only this module of the client reads the environment.
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

# These are not ALBERT_SERVE_..., because the service rejects unknown settings with that prefix.
_URL_VARIABLE: Final = "ALBERT_URL"
_KEY_VARIABLE: Final = "ALBERT_API_KEY"

TIMEOUT_S: Final = 30.0
NUM_RETRIES: Final = 2
MAX_CONCURRENCY: Final = 8
READY_TIMEOUT_S: Final = 60.0
# A service allows its answers the same amount of memory (docs/operate.md).
MAX_REPLY_BYTES: Final = 64 << 20
LOCAL_URL: Final = "http://local"
# A day, because a list of any length is one call and no other caller waits.
LOCAL_TIMEOUT_S: Final = 86_400.0
# This is the default of httpx.
_MIN_KEEPALIVE_CONNECTIONS: Final = 20


_HttpT = TypeVar("_HttpT", httpx.Client, httpx.AsyncClient)


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """The address of a service, and the options of calls.

    Attributes:
        base_url: address of the service.
        headers: HTTP headers of every request.
        timeout_s: time limit of a call, including all its requests and delays.
        num_retries: maximum number of retries of a request.
        max_concurrency: maximum number of concurrent requests of a call.
        max_reply_bytes: maximum size of a decoded reply.
    """

    base_url: str
    headers: Mapping[str, str]
    timeout_s: float
    num_retries: int
    max_concurrency: int
    max_reply_bytes: int

    def __post_init__(self) -> None:
        if not self.timeout_s > 0:
            raise ConfigError(f"timeout_s is {self.timeout_s}. It must be more than 0.")
        for name, minimum in (("num_retries", 0), ("max_concurrency", 1), ("max_reply_bytes", 1)):
            if (value := getattr(self, name)) < minimum:
                raise ConfigError(f"{name} is {value}. It must be {minimum} or more.")

    def open_http(self, client: type[_HttpT]) -> _HttpT:
        """Return a new httpx client that keeps a connection open for each concurrent request."""
        num_keepalive = max(_MIN_KEEPALIVE_CONNECTIONS, self.max_concurrency)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=num_keepalive)
        is_async = issubclass(client, httpx.AsyncClient)
        hooks: dict[str, list[Callable[..., Any]]] = {"request": [_OneLoop()] if is_async else []}
        # Requests to this machine need no proxy. For HTTPS, the environment can name certificates.
        trusts_env = not _is_loopback(self.base_url)
        try:
            return client(limits=limits, trust_env=trusts_env, event_hooks=hooks)
        except (ImportError, ValueError, httpx.InvalidURL) as error:
            raise ConfigError(
                f"The proxy variables (http_proxy, https_proxy, all_proxy, no_proxy) cannot be "
                f"used: {error}. Correct them, or pass http_client=httpx.{client.__name__}"
                "(trust_env=False)."
            ) from error


class _OneLoop:
    """A hook that rejects requests from a second event loop, which cannot use the connections."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, request: httpx.Request) -> None:
        loop = asyncio.get_running_loop()
        self._loop = self._loop or loop
        if self._loop is not loop:
            raise ConfigError(
                "This AsyncAlbertClient was used on another event loop. Create a client for each "
                "event loop (`async with AsyncAlbertClient(...)` inside asyncio.run), or use "
                "AlbertClient."
            )


def service_url(base_url: str | None, model: str | None) -> str:
    """Return the URL of a service, or of one of its models.

    Args:
        base_url: address of the service, or None for the value of ALBERT_URL.
        model: name of a model, or None for the default model.
    """
    name, url = "base_url", base_url
    if url is None:
        name, url = _URL_VARIABLE, _variable(_URL_VARIABLE)
    if url is None:
        raise ConfigError(
            f'No address is set. Pass base_url, such as "http://127.0.0.1:3000", or set '
            f"{_URL_VARIABLE}."
        )
    if not url.startswith(("http://", "https://")) or not _host(url):
        raise ConfigError(
            f"{name} is {url!r}. It must begin with http:// or https:// and a host, "
            'such as "http://127.0.0.1:3000".'
        )
    path = "" if model is None else MODEL_PATH.format(model=quote(model, safe=""))
    return url.rstrip("/") + path


def authorization(api_key: str | None) -> dict[str, str]:
    """Return the header with a key.

    Args:
        api_key: API key. None means the value of ALBERT_API_KEY, if it is set, and "" means no key.
    """
    name, key = "api_key", api_key
    if key is None:
        name, key = _KEY_VARIABLE, _variable(_KEY_VARIABLE)
    if not key:
        return {}
    if not (key.isascii() and key.isprintable() and key == key.strip()):
        raise ConfigError(
            f"{name} begins or ends with a space, or has characters that a header cannot contain. "
            "Check that it is complete."
        )
    return {"Authorization": f"Bearer {key}"}


def open_transport(
    bundle: str | os.PathLike[str] | None, num_threads: int | None, device: Device
) -> LocalTransport:
    """Open a bundle in this process. Only this function imports the serving stack."""
    try:
        from albert_serve.local import LocalTransport
        from albert_serve.settings import RuntimeOptions
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"A local model needs {error.name}. Run {how_to_install('serve')}."
        ) from error
    return LocalTransport(bundle, RuntimeOptions(device=device, num_threads=num_threads))


def _variable(name: str) -> str | None:
    """Return an environment variable, or None if it is unset or blank."""
    return os.environ.get(name, "").strip() or None


def _is_loopback(url: str) -> bool:
    """Return whether a URL is an HTTP address of this machine."""
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
