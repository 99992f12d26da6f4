"""Authentication by bearer keys, and CORS.

Keys come from the environment, from a file, or from both. All of them are valid at once, so that a
new key can be handed out before the old one is revoked.
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

from albert_serve.api.schemas import (
    TRUNCATED_HEADER,
    WARNINGS_HEADER,
)
from albert_serve.errors import ConfigError, UnauthorizedError
from albert_serve.files import read_small_file
from albert_serve.server.error_replies import REQUEST_ID_HEADER, error_response
from albert_serve.server.paths import target_of
from albert_serve.settings import Settings, Surface

MIN_KEY_CHARS: Final = 16
_MAX_FILE_BYTES: Final = 1 << 20
# RFC 6750 defines this syntax of bearer tokens.
_KEY: Final = re.compile(r"[A-Za-z0-9._~+/-]+=*")
_MAKE_KEY: Final = 'python -c "import secrets; print(secrets.token_urlsafe())" makes one'
_REALM: Final = 'Bearer realm="albert_serve"'
_Stamp: TypeAlias = tuple[int, int, int]
_logger = logging.getLogger(__name__)


class ApiKeys:
    """The valid keys; only their hashes are kept, and the file is read again when it changes.

    Args:
        keys: valid for as long as the process runs.
        file: keys one a line; empty lines and those that begin with # are skipped.

    Raises:
        ConfigError: there is no key, or a malformed one, or the file cannot be read.
    """

    def __init__(self, keys: Sequence[str] = (), file: Path | None = None) -> None:
        self._fixed = _hashes(keys, "ALBERT_SERVE_API_KEYS")
        self._file = file
        self._stamp: _Stamp | None = None
        self._from_file: list[bytes] = []
        if file is not None:
            self._stamp = _stamp(file)
            self._from_file = _read_file(file)
        if not self._fixed and not self._from_file:
            raise ConfigError("there is no API key. Set ALBERT_SERVE_API_KEYS.")

    def hold(self, key: str) -> bool:
        """Whether a key is valid; the comparison takes constant time."""
        self._reload_file()
        digest = _hash(key)
        matches = [hmac.compare_digest(digest, valid) for valid in (*self._fixed, *self._from_file)]
        return any(matches)

    def _reload_file(self) -> None:
        """Read the file again if it changed; if it is invalid, the former keys stay valid."""
        if self._file is None:
            return
        stamp = _stamp(self._file)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._from_file = _read_file(self._file)
        except ConfigError as error:
            _logger.error("%s. The previous keys stay valid.", error)
        else:
            _logger.warning("%d API keys were read again", len(self._from_file))


class ApiKeyMiddleware:
    """ASGI middleware that answers 401 on guarded surfaces to requests without a valid key."""

    def __init__(self, app: ASGIApp, *, keys: ApiKeys, surfaces: Collection[Surface]) -> None:
        self.app = app
        self._keys = keys
        self._surfaces = surfaces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it before any of its body is read."""
        is_guarded = scope["type"] == "http" and target_of(scope).surface in self._surfaces
        refusal = self._refusal(Headers(scope=scope)) if is_guarded else None
        if refusal is None:
            await self.app(scope, receive, send)
        else:
            response = error_response(refusal, scope)
            has_token = "authorization" in Headers(scope=scope)
            reason = ', error="invalid_token"' if has_token else ""
            response.headers["WWW-Authenticate"] = f"{_REALM}{reason}"
            await response(scope, receive, send)

    def _refusal(self, headers: Headers) -> UnauthorizedError | None:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if not scheme:
            return UnauthorizedError(
                "an API key is required. Send it in the header Authorization: Bearer KEY."
            )
        if scheme.lower() != "bearer" or not self._keys.hold(key.strip()):
            return UnauthorizedError(
                "the API key is not valid. Send the whole key in the header Authorization: "
                "Bearer KEY."
            )
        return None


def cors_options(settings: Settings) -> dict[str, Any]:
    """Return the options of Starlette's CORS middleware; cookies are not used, nor allowed."""
    return {
        "allow_origins": settings.cors_origins,
        "allow_methods": ("GET", "HEAD", "POST"),
        "allow_headers": ("Authorization", "Content-Type", REQUEST_ID_HEADER),
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
    """Return the hashes of keys; error messages never contain a key."""
    for number, key in enumerate(keys, start=1):
        if not _KEY.fullmatch(key):
            raise ConfigError(
                f"{source}: key {number} contains invalid characters. Allowed are ASCII "
                "letters, digits and . _ ~ + / - ="
            )
        if len(key) < MIN_KEY_CHARS:
            raise ConfigError(
                f"{source}: key {number} has {len(key)} characters; it must have "
                f"{MIN_KEY_CHARS} or more: {_MAKE_KEY}"
            )
    return [_hash(key) for key in keys]


def _read_file(file: Path) -> list[bytes]:
    try:
        text = read_small_file(file, _MAX_FILE_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the file of API keys, {file}, cannot be read: {error}") from error
    lines = [line.strip() for line in text.splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(
            f"the file of API keys, {file}, contains no key. Put one key on each line: {_MAKE_KEY}"
        )
    return _hashes(keys, str(file))


def _stamp(file: Path) -> _Stamp | None:
    """Return the modification time, size and inode of a file; None if it does not exist."""
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
