"""The service that a client calls: its address, its key, and the options of calls.

This is the only module of the client that reads the environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self
from urllib.parse import quote

import httpx

from albert_serve.api.schemas import MODEL_PATH
from albert_serve.client.replies import ACCEPTED_ENCODING, ReplyBody
from albert_serve.errors import ConfigError

# Not ALBERT_SERVE_..., which are settings of the service: it refuses those that it does not know.
URL_VARIABLE: Final = "ALBERT_URL"
KEY_VARIABLE: Final = "ALBERT_API_KEY"

TIMEOUT_S: Final = 30.0
NUM_RETRIES: Final = 2
MAX_CONCURRENCY: Final = 8
# As many as httpx keeps by default.
_MIN_KEPT_CONNECTIONS: Final = 20


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

    @classmethod
    def at(
        cls,
        base_url: str | None,
        *,
        model: str | None,
        api_key: str | None,
        timeout_s: float,
        num_retries: int,
        max_concurrency: int,
        max_reply_bytes: int,
    ) -> Self:
        """Return the service at this address, or one model of it.

        Args:
            base_url: None for that of the environment.
            api_key: None for that of the environment, if it has one; "" for none.

        Raises:
            ConfigError: there is no address, it is not an HTTP URL, the key cannot be sent, or a
                number is out of its range.
        """
        if not timeout_s > 0:
            raise ConfigError(f"timeout_s is {timeout_s}; it must be over 0")
        if num_retries < 0:
            raise ConfigError(f"num_retries is {num_retries}; it must be 0 or more")
        if max_concurrency < 1:
            raise ConfigError(f"max_concurrency is {max_concurrency}; it must be 1 or more")
        if max_reply_bytes < 1:
            raise ConfigError(f"max_reply_bytes is {max_reply_bytes}; it must be 1 or more")
        path = "" if model is None else MODEL_PATH.format(model=quote(model, safe=""))
        return cls(
            base_url=_address(base_url) + path,
            headers={"Accept-Encoding": ACCEPTED_ENCODING, **_authorization(api_key)},
            timeout_s=timeout_s,
            num_retries=num_retries,
            max_concurrency=max_concurrency,
            max_reply_bytes=max_reply_bytes,
        )

    @property
    def connection_limits(self) -> httpx.Limits:
        """The limits of a client of its own: as many connections as its callers use at once."""
        num_kept = max(_MIN_KEPT_CONNECTIONS, self.max_concurrency)
        return httpx.Limits(max_connections=None, max_keepalive_connections=num_kept)

    def body(self, response: httpx.Response) -> ReplyBody:
        """Return the collector of a response's body.

        Raises:
            RequestError: the response has an encoding that was not asked for.
        """
        return ReplyBody(response, self.max_reply_bytes)


def _address(base_url: str | None) -> str:
    name, url = "base_url", base_url
    if url is None:
        name, url = URL_VARIABLE, _variable(URL_VARIABLE)
    if url is None:
        raise ConfigError(
            f'there is no address; pass base_url, such as "http://127.0.0.1:3000", or set '
            f"{URL_VARIABLE}"
        )
    if not url.startswith(("http://", "https://")) or not _host(url):
        raise ConfigError(
            f"{name} is {url!r}; it must begin with http:// or https://, and a host, "
            'such as "http://127.0.0.1:3000"'
        )
    return url.rstrip("/")


def _authorization(api_key: str | None) -> dict[str, str]:
    name, key = "api_key", api_key
    if key is None:
        name, key = KEY_VARIABLE, _variable(KEY_VARIABLE)
    if not key:
        return {}
    if not (key.isascii() and key.isprintable() and key == key.strip()):
        raise ConfigError(
            f"{name} begins or ends with a space, or holds characters that no header can have; "
            "is it whole?"
        )
    return {"Authorization": f"Bearer {key}"}


def _variable(name: str) -> str | None:
    """Return a variable of the environment; None if it is not set.

    Raises:
        ConfigError: it is set, but blank.
    """
    value = os.environ.get(name)
    if value is not None and not value.strip():
        raise ConfigError(f"{name} is set, but blank; put a value into it, or unset it")
    return None if value is None else value.strip()


def _host(url: str) -> str:
    try:
        return httpx.URL(url).host
    except httpx.InvalidURL:
        return ""
