"""Every error that the package raises for a caller, as one tree.

A message has one sentence for the fault with its value, and one for the remedy.

    AlbertServeError
    ├── ConfigError            an invalid configuration                  (ValueError)
    ├── HubError               a model or data set that cannot be downloaded
    ├── BundleError            a bundle that cannot be opened
    │   ├── BundleMissingError     a file of the bundle does not exist
    │   └── BundleCorruptError     a file is damaged, or contradicts another file
    ├── EngineError            the runtime failed, or gave non-finite numbers
    └── RequestError           a request that cannot be answered; has an HTTP status
        ├── MalformedRequestError  400
        ├── UnauthorizedError      401
        ├── NotFoundError          404
        ├── BodyTooLargeError      413
        ├── UnsupportedMediaError  415
        ├── InvalidInputError      422   (ValueError)
        │   ├── NoMaskError
        │   ├── TextTooLongError
        │   └── TooMuchAtOnceError
        ├── QueueFullError         429
        ├── NotReadyError          503
        └── DeadlineExceededError  504
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import Final

from pydantic import ValidationError

_MAX_FAULTS: Final = 3
_MAX_KEY_CHARS: Final = 64
# Longer lists of names are shortened.
_MAX_LISTED: Final = 10
_NUM_LISTED: Final = 3
_INPUT_INDEX: Final = re.compile(r"inputs\[(\d{1,18})\]")


# These control characters change a terminal's state or the direction of text. Tabs and line breaks
# are allowed.
_CONTROLS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Return a text with escaped control characters, which untrusted names may contain."""
    return _CONTROLS.sub(lambda match: repr(match[0])[1:-1], text)


def how_to_install(extra: str) -> str:
    """Return the commands that install an extra, from the package index and in a clone."""
    return f"pip install 'albert-serve[{extra}]', or in a clone pip install '.[{extra}]'"


def describe_faults(error: Exception) -> str:
    """Return the paths and texts of the first faults that pydantic found in a file, in one line."""
    if not isinstance(error, ValidationError):
        return str(error)
    return "; ".join(
        ": ".join(filter(None, (_path(fault["loc"]), fault["msg"])))
        for fault in error.errors(include_url=False, include_input=False)[:_MAX_FAULTS]
    )


def _path(keys: tuple[int | str, ...]) -> str:
    return ".".join(str(key)[:_MAX_KEY_CHARS] for key in keys)


def listed(names: Sequence[str]) -> str:
    """Return names for a message, of which only three are listed if there are more than ten."""
    if len(names) <= _MAX_LISTED:
        return ", ".join(names)
    return f"{', '.join(names[:_NUM_LISTED])}, ... and {len(names) - _NUM_LISTED:,} more"


class AlbertServeError(Exception):
    """Base of all errors raised on purpose by this package.

    Attributes:
        status: HTTP status of the reply.
        error_type: value of `error_type` in the reply.
        exit_status: exit status of a command.
    """

    status: HTTPStatus = HTTPStatus.INTERNAL_SERVER_ERROR
    error_type: str = "internal"
    exit_status: int = 1


class ConfigError(AlbertServeError, ValueError):
    """An invalid configuration of a model or a service."""

    error_type = "config"


class HubError(AlbertServeError):
    """A model or data set of the Hugging Face Hub that cannot be downloaded."""


class BundleError(AlbertServeError):
    """A bundle that cannot be opened."""

    error_type = "bundle"


class BundleMissingError(BundleError):
    """A file that the bundle needs does not exist."""


class BundleCorruptError(BundleError):
    """A file of the bundle is damaged, or contradicts the manifest or the weights."""


class EngineError(AlbertServeError):
    """The runtime failed, or the model produced numbers that are not finite."""

    error_type = "engine"


class RequestError(AlbertServeError):
    """A request that cannot be answered.

    Attributes:
        request_id: id of the request in the service's log, if known.
    """

    request_id: str | None = None

    @property
    def input_index(self) -> int | None:
        """The index of the rejected input in the caller's list, or None if there was no list."""
        match = _INPUT_INDEX.match(str(self))
        return None if match is None else int(match[1])


class MalformedRequestError(RequestError):
    """The body is not JSON, or does not match the endpoint's schema."""

    status = HTTPStatus.BAD_REQUEST
    error_type = "malformed"


class UnauthorizedError(RequestError):
    """The API key is missing or invalid."""

    status = HTTPStatus.UNAUTHORIZED
    error_type = "unauthorized"


class NotFoundError(RequestError):
    """The endpoint, model or task does not exist."""

    status = HTTPStatus.NOT_FOUND
    error_type = "not_found"


class BodyTooLargeError(RequestError):
    """The body is larger than the service allows."""

    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    error_type = "body_too_large"


class UnsupportedMediaError(RequestError):
    """The body is not `application/json`."""

    status = HTTPStatus.UNSUPPORTED_MEDIA_TYPE
    error_type = "unsupported_media"


class InvalidInputError(RequestError, ValueError):
    """The JSON has a value that the task does not accept."""

    status = HTTPStatus.UNPROCESSABLE_ENTITY
    error_type = "invalid_input"


class NoMaskError(InvalidInputError):
    """The text for fill-mask has no mask token."""

    error_type = "no_mask"


class TextTooLongError(InvalidInputError):
    """The text has more tokens than the model reads, and truncation is off."""

    error_type = "too_long"


class TooMuchAtOnceError(InvalidInputError):
    """The request is too large, but its items can be sent in several requests."""

    error_type = "too_much_at_once"


class QueueFullError(RequestError):
    """The service has too many requests. Try again after `retry_after_s`."""

    status = HTTPStatus.TOO_MANY_REQUESTS
    error_type = "overloaded"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NotReadyError(RequestError):
    """The service is starting or draining."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    error_type = "not_ready"


class DeadlineExceededError(RequestError):
    """The request waited longer than its deadline."""

    status = HTTPStatus.GATEWAY_TIMEOUT
    error_type = "deadline"


def request_error(status: int, message: str, error_type: str | None = None) -> RequestError:
    """Return the error for a reply's status and type, or `RequestError` for an unknown status."""
    candidates = [kind for kind in _request_errors(RequestError) if kind.status == status]
    matches = [kind for kind in candidates if kind.error_type == error_type]
    kind = (matches or candidates or [RequestError])[0]
    return kind(message)


def _request_errors(base: type[RequestError]) -> list[type[RequestError]]:
    """Return the subclasses of `base`, a parent before its children."""
    direct = base.__subclasses__()
    return direct + [kind for parent in direct for kind in _request_errors(parent)]
