"""Every error that the package raises for a caller, as one tree.

The message says what was got, what is allowed and how to mend it.

    AlbertServeError
    ├── ConfigError            a configuration that cannot be            (ValueError)
    ├── HubError               a model or data set that cannot be downloaded
    ├── BundleError            a bundle that cannot be opened
    │   ├── BundleMissingError     a file of it is not there
    │   └── BundleCorruptError     a file of it is damaged or contradicts another
    ├── EngineError            the runtime failed, or gave non-finite numbers
    └── RequestError           a request that cannot be answered; knows its HTTP status
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
# Longer lists of names are cut.
_MAX_LISTED: Final = 10
_NUM_LISTED: Final = 3
_INPUT_INDEX: Final = re.compile(r"inputs\[(\d{1,18})\]")


# All but tabs and line breaks: they would change the state of a terminal.
# Those of ASCII and ISO 8859, and those that change the direction of text.
_CONTROLS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Return a text whose control characters are escaped; names in it may be anybody's."""
    return _CONTROLS.sub(lambda match: repr(match[0])[1:-1], text)


def how_to_install(extra: str) -> str:
    """Return the commands that install an extra; pip does not fetch a package that is installed."""
    return f"pip install 'albert-serve[{extra}]', or in a clone pip install '.[{extra}]'"


def describe_faults(error: Exception) -> str:
    """Return the place and text of the first faults that pydantic found in a file, in one line."""
    if not isinstance(error, ValidationError):
        return str(error)
    return "; ".join(
        ": ".join(filter(None, (_place(fault["loc"]), fault["msg"])))
        for fault in error.errors(include_url=False, include_input=False)[:_MAX_FAULTS]
    )


def _place(keys: tuple[int | str, ...]) -> str:
    return ".".join(str(key)[:_MAX_KEY_CHARS] for key in keys)


def listed(names: Sequence[str]) -> str:
    """Return names for a message; of more than ten the first three, and how many more there are."""
    if len(names) <= _MAX_LISTED:
        return ", ".join(names)
    return f"{', '.join(names[:_NUM_LISTED])}, ... and {len(names) - _NUM_LISTED:,} more"


class AlbertServeError(Exception):
    """Base of all errors raised on purpose by this package.

    Attributes:
        status: of a reply over HTTP.
        exit_status: of a command.
    """

    status: HTTPStatus = HTTPStatus.INTERNAL_SERVER_ERROR
    error_type: str = "internal"
    exit_status: int = 1


class ConfigError(AlbertServeError, ValueError):
    """A model or service configuration that contradicts itself."""

    error_type = "config"


class HubError(AlbertServeError):
    """A model or data set of the Hugging Face Hub that cannot be downloaded."""


class BundleError(AlbertServeError):
    """A bundle that cannot be opened."""

    error_type = "bundle"


class BundleMissingError(BundleError):
    """A file that the bundle needs is not there."""


class BundleCorruptError(BundleError):
    """A file of the bundle is damaged, or contradicts the manifest or the weights."""


class EngineError(AlbertServeError):
    """The runtime failed, or the model produced numbers that are not finite."""

    error_type = "engine"


class RequestError(AlbertServeError):
    """A request that cannot be answered.

    Attributes:
        request_id: the id under which the service logged the request, where one is known.
    """

    request_id: str | None = None

    @property
    def input_index(self) -> int | None:
        """The index of the input that is refused, in the caller's list; None if it has none."""
        named = _INPUT_INDEX.match(str(self))
        return None if named is None else int(named[1])


class MalformedRequestError(RequestError):
    """The body is not JSON, or not the JSON that the endpoint takes."""

    status = HTTPStatus.BAD_REQUEST
    error_type = "malformed"


class UnauthorizedError(RequestError):
    """A missing or unknown key."""

    status = HTTPStatus.UNAUTHORIZED
    error_type = "unauthorized"


class NotFoundError(RequestError):
    """No such endpoint, model or task."""

    status = HTTPStatus.NOT_FOUND
    error_type = "not_found"


class BodyTooLargeError(RequestError):
    """The body is over the service's limit."""

    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    error_type = "body_too_large"


class UnsupportedMediaError(RequestError):
    """The body is not `application/json`."""

    status = HTTPStatus.UNSUPPORTED_MEDIA_TYPE
    error_type = "unsupported_media"


class InvalidInputError(RequestError, ValueError):
    """Well-formed JSON with a value that the task cannot take."""

    status = HTTPStatus.UNPROCESSABLE_ENTITY
    error_type = "invalid_input"


class NoMaskError(InvalidInputError):
    """A fill-mask text without a mask token."""

    error_type = "no_mask"


class TextTooLongError(InvalidInputError):
    """A text of more tokens than the model has positions, and no leave to truncate."""

    error_type = "too_long"


class TooMuchAtOnceError(InvalidInputError):
    """A request that would be taken in parts: its items are too many, or too long together."""

    error_type = "too_much_at_once"


class QueueFullError(RequestError):
    """More work is waiting than the service accepts; try again after `retry_after_s`."""

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
    """Return the error of a reply's status; `RequestError` itself for an unknown one."""
    candidates = [kind for kind in _request_errors(RequestError) if kind.status == status]
    named = [kind for kind in candidates if kind.error_type == error_type]
    kind = (named or candidates or [RequestError])[0]
    return kind(message)


def _request_errors(base: type[RequestError]) -> list[type[RequestError]]:
    """Return the subclasses of `base`, a parent before its children."""
    direct = base.__subclasses__()
    return direct + [kind for parent in direct for kind in _request_errors(parent)]
