"""Who is let in: bearer keys, and the pages of other origins.

Keys come from the environment, from a file, or from both. All that hold are let in, so that a new
key can be given out before the old one is taken back.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from albert_serve.api.schemas import TRUNCATED_HEADER, WARNINGS_HEADER
from albert_serve.errors import ConfigError, UnauthorizedError
from albert_serve.server.error_replies import REQUEST_ID_HEADER, error_response
from albert_serve.server.surfaces import surface_of
from albert_serve.settings import Settings, Surface

PRIORITY_HEADER: Final = "X-Priority"
MIN_KEY_CHARS: Final = 16
_MAX_FILE_BYTES: Final = 1 << 20
# What RFC 6750 lets a bearer token consist of.
_KEY: Final = re.compile(r"[A-Za-z0-9._~+/-]+=*")
_MAKE_ONE: Final = 'python -c "import secrets; print(secrets.token_urlsafe())" makes one'
_REALM: Final = 'Bearer realm="albert_serve"'
_POLICY_VIOLATION: Final = 1008
_Stamp: TypeAlias = tuple[int, int, int]
_logger = logging.getLogger(__name__)


class ApiKeys:
    """The keys that are let in. Those of the file follow it; only their hashes are kept.

    Args:
        given: keys that hold for as long as the process runs.
        file: keys one a line; empty lines and those that begin with # are passed over.

    Raises:
        ConfigError: there is no key, or one that cannot be, or the file cannot be read.
    """

    def __init__(self, given: Sequence[str] = (), file: Path | None = None) -> None:
        self._given = _hashes(given, "ALBERT_SERVE_API_KEYS")
        self._file = file
        self._stamp: _Stamp | None = None
        self._from_file: list[bytes] = []
        if file is not None:
            self._stamp = _stamp(file)
            self._from_file = _read_file(file)
        if not self._given and not self._from_file:
            raise ConfigError("there is no API key; set ALBERT_SERVE_API_KEYS")

    def hold(self, key: str) -> bool:
        """Whether a key is one of them; how long it takes says nothing about which, or how far."""
        self._follow_file()
        given = _hash(key)
        known = [hmac.compare_digest(given, one) for one in (*self._given, *self._from_file)]
        return any(known)

    def _follow_file(self) -> None:
        """Read the file again if it changed; while it cannot be taken, the former keys hold."""
        if self._file is None:
            return
        stamp = _stamp(self._file)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._from_file = _read_file(self._file)
        except ConfigError as error:
            _logger.error("%s; the keys read before still hold", error)
        else:
            _logger.warning("%d API keys were read anew", len(self._from_file))


class Guard:
    """ASGI middleware: without a key, no way to the surfaces that are guarded."""

    def __init__(self, app: ASGIApp, *, keys: ApiKeys, surfaces: Collection[Surface]) -> None:
        self.app = app
        self._keys = keys
        self._surfaces = surfaces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it before any of its body is read."""
        is_guarded = scope["type"] != "lifespan" and surface_of(scope["path"]) in self._surfaces
        refusal = self._refusal(Headers(scope=scope)) if is_guarded else None
        if refusal is None:
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
        else:
            response = error_response(refusal, scope)
            told = ', error="invalid_token"' if "authorization" in Headers(scope=scope) else ""
            response.headers["WWW-Authenticate"] = f"{_REALM}{told}"
            await response(scope, receive, send)

    def _refusal(self, headers: Headers) -> UnauthorizedError | None:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if not scheme:
            return UnauthorizedError(
                "an API key is needed; send it in the header Authorization: Bearer KEY"
            )
        if scheme.lower() != "bearer" or not self._keys.hold(key.strip()):
            return UnauthorizedError(
                "the API key is not known here; see that the header Authorization is Bearer KEY, "
                "with the whole key"
            )
        return None


def cors_options(settings: Settings) -> dict[str, Any]:
    """What Starlette's CORS middleware is to allow. Cookies play no part here, so none are sent."""
    return {
        "allow_origins": settings.cors_origins,
        "allow_methods": ("GET", "HEAD", "POST"),
        "allow_headers": ("Authorization", "Content-Type", REQUEST_ID_HEADER, PRIORITY_HEADER),
        "expose_headers": (
            REQUEST_ID_HEADER,
            TRUNCATED_HEADER,
            WARNINGS_HEADER,
            "Retry-After",
            "WWW-Authenticate",
        ),
    }


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _hashes(keys: Sequence[str], source: str) -> list[bytes]:
    """The hashes of keys. A message about one never holds it."""
    for number, key in enumerate(keys, start=1):
        if not _KEY.fullmatch(key):
            raise ConfigError(
                f"{source}: key {number} has characters that no key has; allowed are ASCII "
                "letters, digits and . _ ~ + / - ="
            )
        if len(key) < MIN_KEY_CHARS:
            raise ConfigError(
                f"{source}: key {number} has {len(key)} characters; it must have "
                f"{MIN_KEY_CHARS} or more: {_MAKE_ONE}"
            )
    return [_hash(key) for key in keys]


def _read_file(file: Path) -> list[bytes]:
    try:
        with file.open(encoding="utf-8") as opened:
            text = opened.read(_MAX_FILE_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the file of API keys, {file}, cannot be read: {error}") from error
    if len(text) > _MAX_FILE_BYTES:
        raise ConfigError(f"the file of API keys, {file}, is over {_MAX_FILE_BYTES} characters")
    lines = [line.strip() for line in text.splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(
            f"the file of API keys, {file}, holds none; put one in a line: {_MAKE_ONE}"
        )
    return _hashes(keys, str(file))


def _stamp(file: Path) -> _Stamp | None:
    """What changes with a file; None where there is none now."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
