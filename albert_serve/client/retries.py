"""The deadline of a call, and the retries of its requests.

A request is sent again if the service is overloaded, not ready or out of reach. It is not sent
again after a timeout, because it would take the same time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import httpx

from albert_serve.client.calls import BAD_GATEWAY
from albert_serve.errors import DeadlineExceededError, NotReadyError, QueueFullError, RequestError

RETRIED_STATUSES: Final = frozenset({429, BAD_GATEWAY, 503})
# Over soon, as after a start.
TRANSIENT_ERRORS: Final = (DeadlineExceededError, NotReadyError, QueueFullError)
_FIRST_DELAY_S: Final = 0.2


class Deadline:
    """The deadline of a call to the service at `url`."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._url = url
        self._timeout_s = float(timeout_s)  # a number of numpy may be none for threads
        self._ends_s = time.monotonic() + self._timeout_s

    def left_s(self) -> float:
        """Return the remaining time."""
        left_s = self._ends_s - time.monotonic()
        if left_s <= 0:
            raise self._error()
        return left_s

    def allows(self, delay_s: float) -> bool:
        """Return whether there is time after a delay."""
        return time.monotonic() + delay_s < self._ends_s

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Raise what fails in httpx as errors of the service, in `with`."""
        try:
            yield
        except (TimeoutError, httpx.TimeoutException) as error:
            raise self._error() from error
        except httpx.DecodingError as error:
            raise RequestError(f"the reply of {self._url} is damaged: {error}") from error
        except httpx.HTTPError as error:
            raise NotReadyError(
                f"cannot reach {self._url}: {str(error) or type(error).__name__}; "
                "is the service running?"
            ) from error

    def _error(self) -> DeadlineExceededError:
        return DeadlineExceededError(
            f"no reply from {self._url} within {self._timeout_s:g} s; "
            "send less at once, or raise timeout_s"
        )


@dataclass(kw_only=True, slots=True)
class CallProgress:
    """The number of answered requests of one call or stream."""

    num_answered: int = 0


class Retries:
    """The retries of one request, at most `limit`, beside the other requests of its call."""

    def __init__(self, limit: int, deadline: Deadline, progress: CallProgress) -> None:
        self._limit = limit
        self._deadline = deadline
        self._progress = progress
        self._num_tries = 0
        self._num_answered = progress.num_answered

    def delay_s(self, error: RequestError, asked_s: float | None = None) -> float:
        """Return the delay before the next retry: `Retry-After`, or one that grows."""
        self._num_tries += 1
        if isinstance(error, QueueFullError) and self._progress.num_answered > self._num_answered:
            # Other parts of the call are answered, so that this one's turn will come.
            self._num_tries, self._num_answered = 0, self._progress.num_answered
        delay_s = _FIRST_DELAY_S * 2 ** (self._num_tries - 1) if asked_s is None else asked_s
        # Jitter, so that clients that were refused together do not come back together.
        delay_s *= random.uniform(1.0, 1.25)
        if self._num_tries > self._limit or not self._deadline.allows(delay_s):
            raise error
        return delay_s
