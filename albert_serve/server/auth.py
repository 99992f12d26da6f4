"""Access to the service: bearer keys, allowed host names, and CORS.

Keys come from the environment, from a file that is read at startup, or from both. Several keys can
be valid, so that callers can get a new key before the old key is revoked.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from albert_serve.api.schemas import TRUNCATED_HEADER, WARNINGS_HEADER
from albert_serve.errors import ConfigError, MalformedRequestError, UnauthorizedError
from albert_serve.files import read_small_file
from albert_serve.server.errors import REQUEST_ID_HEADER, error_response
from albert_serve.server.paths import HEALTH_PATHS, target_of
from albert_serve.settings import HOSTS_VARIABLE, Settings, Surface

MIN_KEY_CHARS: Final = 16
_MAX_FILE_BYTES: Final = 1 << 20
# RFC 6750 defines this syntax of bearer tokens.
_KEY: Final = re.compile(r"[A-Za-z0-9._~+/-]+=*")
_KEY_COMMAND: Final = 'python -c "import secrets; print(secrets.token_urlsafe())"'
_REALM: Final = 'Bearer realm="albert_serve"'


def read_keys(keys: Sequence[str], file: Path | None) -> list[bytes]:
    """Return the SHA-256 hashes of the valid keys.

    Args:
        keys: keys from the environment.
        file: file of additional keys, one per line. Empty lines and lines that start with # are
            ignored.
    """
    hashes = _hashes(keys, "ALBERT_SERVE_API_KEYS")
    if file is not None:
        hashes += _read_file(file)
    if not hashes:
        raise ConfigError("An API key is missing. Set ALBERT_SERVE_API_KEYS.")
    return hashes


class ApiKeyMiddleware:
    """ASGI middleware that rejects requests to guarded surfaces without a valid key (401)."""

    def __init__(
        self, app: ASGIApp, *, hashes: Sequence[bytes], surfaces: Collection[Surface]
    ) -> None:
        self.app = app
        self._hashes = hashes
        self._surfaces = surfaces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or reject it before its body is read."""
        is_guarded = scope["type"] == "http" and target_of(scope).surface in self._surfaces
        error = self._check(Headers(scope=scope)) if is_guarded else None
        if error is None:
            await self.app(scope, receive, send)
        else:
            response = error_response(error, scope)
            has_token = "authorization" in Headers(scope=scope)
            reason = ', error="invalid_token"' if has_token else ""
            response.headers["WWW-Authenticate"] = f"{_REALM}{reason}"
            await response(scope, receive, send)

    def _check(self, headers: Headers) -> UnauthorizedError | None:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if not scheme:
            return UnauthorizedError(
                "An API key is required. Send it in the header Authorization: Bearer KEY."
            )
        if scheme.lower() != "bearer" or not self._is_valid(key.strip()):
            return UnauthorizedError(
                "The API key is not valid. Send the complete key in the header Authorization: "
                "Bearer KEY."
            )
        return None

    def _is_valid(self, key: str) -> bool:
        """Return whether a key is valid, without a time that depends on the key's characters."""
        digest = _hash(key)
        matches = [hmac.compare_digest(digest, valid) for valid in self._hashes]
        return any(matches)


class AllowedHosts:
    """ASGI middleware that rejects requests for other hosts (400), except health checks.

    The owner of a web page can make its name resolve to this machine (DNS rebinding). The browser
    then considers the service part of the page's origin and does not apply CORS. Only the header
    `Host` shows the difference.

    Args:
        hosts: allowed names and addresses; `*.example.com` allows all names with this ending.
    """

    def __init__(self, app: ASGIApp, *, hosts: Sequence[str]) -> None:
        self.app = app
        self._hosts = [host.lower().strip("[]") for host in hosts]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or reject it before its body is read."""
        if scope["type"] != "http" or scope["path"] in HEALTH_PATHS:
            await self.app(scope, receive, send)
            return
        host = Headers(scope=scope).get("host", "")
        if self._allows(host):
            await self.app(scope, receive, send)
            return
        error = MalformedRequestError(
            f"The service does not accept the host {host[:80]!r}. Use one of "
            f"{', '.join(self._hosts)}, or allow others with {HOSTS_VARIABLE}."
        )
        await error_response(error, scope)(scope, receive, send)

    def _allows(self, host: str) -> bool:
        try:
            host = urlsplit(f"//{host}").hostname or ""
        except ValueError:  # brackets that contain no address
            return False
        return any(
            host == allowed or (allowed.startswith("*.") and host.endswith(allowed[1:]))
            for allowed in self._hosts
        )


def cors_options(settings: Settings) -> dict[str, Any]:
    """Return the options of Starlette's CORS middleware, which allows no cookies."""
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
    """Return the hashes of keys. Error messages never contain a key."""
    for number, key in enumerate(keys, start=1):
        if not _KEY.fullmatch(key):
            raise ConfigError(
                f"{source}: Key {number} contains invalid characters. Use ASCII letters, digits "
                "and . _ ~ + / - =."
            )
        if len(key) < MIN_KEY_CHARS:
            raise ConfigError(
                f"{source}: Key {number} has {len(key)} characters. Use {MIN_KEY_CHARS} or more, "
                f"such as the output of `{_KEY_COMMAND}`."
            )
    return [_hash(key) for key in keys]


def _read_file(file: Path) -> list[bytes]:
    try:
        text = read_small_file(file, _MAX_FILE_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}, the file of API keys, cannot be read: {error}") from error
    lines = [line.strip() for line in text.splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(
            f"{file}, the file of API keys, contains no key. Write one key per line, such as the "
            f"output of `{_KEY_COMMAND}`."
        )
    return _hashes(keys, str(file))
