"""The deadline of a call, and the retries of its requests.

A request is retried if the service is overloaded, not ready or unreachable. It is not retried after
a timeout, because it would take as long again.
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
# Errors that can disappear, for example when the service has started.
TRANSIENT_ERRORS: Final = (DeadlineExceededError, NotReadyError, QueueFullError)
_FIRST_DELAY_S: Final = 0.2


class Deadline:
    """The deadline of a call to the service at `url`."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._url = url
        self._timeout_s = float(timeout_s)  # threading rejects numpy numbers
        self._ends_s = time.monotonic() + self._timeout_s

    def remaining_s(self) -> float:
        """Return the remaining time, or raise an error if there is none."""
        remaining_s = self._ends_s - time.monotonic()
        if remaining_s <= 0:
            raise self._error()
        return remaining_s

    def allows(self, delay_s: float) -> bool:
        """Return whether time remains after a delay."""
        return time.monotonic() + delay_s < self._ends_s

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Convert errors of httpx to errors of the service, inside `with`."""
        try:
            yield
        except (TimeoutError, httpx.TimeoutException) as error:
            raise self._error() from error
        except httpx.DecodingError as error:
            raise RequestError(f"The reply of {self._url} is damaged: {error}.") from error
        except httpx.HTTPError as error:
            raise NotReadyError(
                f"Cannot reach {self._url}: {str(error) or type(error).__name__}. "
                "Check that the service is running."
            ) from error

    def _error(self) -> DeadlineExceededError:
        return DeadlineExceededError(
            f"{self._url} did not reply within {self._timeout_s:g} s. "
            "Send fewer inputs, or raise timeout_s."
        )


@dataclass(kw_only=True, slots=True)
class CallProgress:
    """The number of answered requests of one call or stream."""

    num_answered: int = 0


class Retries:
    """The retries of one request of a call, at most `limit`."""

    def __init__(self, limit: int, deadline: Deadline, progress: CallProgress) -> None:
        self._limit = limit
        self._deadline = deadline
        self._progress = progress
        self._num_tries = 0
        self._num_answered = progress.num_answered

    def delay_s(self, error: RequestError, retry_after_s: float | None = None) -> float:
        """Return the delay before the next retry, or raise the error if retrying is useless.

        The delay is `Retry-After` or doubles with each attempt, plus up to a quarter at random.
        """
        self._num_tries += 1
        if isinstance(error, QueueFullError) and self._progress.num_answered > self._num_answered:
            # The service answers other parts of the call, so it will also answer this part.
            self._num_tries, self._num_answered = 0, self._progress.num_answered
        growing_s = _FIRST_DELAY_S * 2 ** (self._num_tries - 1)
        delay_s = growing_s if retry_after_s is None else retry_after_s
        # Jitter spreads the retries of clients that were rejected at the same time.
        delay_s *= random.uniform(1.0, 1.25)
        if self._num_tries > self._limit or not self._deadline.allows(delay_s):
            raise error
        return delay_s
