"""Plans of load: the requests to a service, and their times."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

_OPEN_CONNECTIONS: Final = 1000
_SEED: Final = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ClosedLoop:
    """Each connection sends its next request when it has its reply, until the time is over."""

    num_connections: int
    duration_s: float

    def turns(self, num_requests: int) -> Iterator[int]:
        """Yield the index of the next request."""
        ends_s = time.monotonic() + self.duration_s
        for index in itertools.cycle(range(num_requests)):
            if time.monotonic() >= ends_s:
                return
            yield index


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """A closed loop in whole passes over the requests, so that every run has the same mix.

    Attributes:
        least_s: passes are begun until so much time is over; 0 makes one.
    """

    num_connections: int
    least_s: float = 0.0

    def turns(self, num_requests: int) -> Iterator[int]:
        """Yield the index of the next request."""
        ends_s = time.monotonic() + self.least_s
        while True:
            yield from range(num_requests)
            if time.monotonic() >= ends_s:
                return


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenLoop:
    """Requests are sent by the clock, at even distances, whether or not replies come.

    Attributes:
        num_connections: the most at a time.
    """

    rate_per_s: float
    duration_s: float
    num_connections: int = _OPEN_CONNECTIONS

    def times_s(self, num_requests: int) -> Iterator[float]:
        """Yield the time of each request, in seconds from the start."""
        del num_requests  # they are sent in turns
        due_s = (number / self.rate_per_s for number in itertools.count())
        return itertools.takewhile(lambda each: each < self.duration_s, due_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomArrivals:
    """One pass, as if from many callers: the distances in time have an exponential distribution.

    They are the same at every run.

    Attributes:
        num_connections: the most at a time.
    """

    rate_per_s: float
    num_connections: int = _OPEN_CONNECTIONS

    def times_s(self, num_requests: int) -> Iterator[float]:
        """Yield the time of each request, in seconds from the start."""
        draw = random.Random(_SEED)
        return itertools.accumulate(draw.expovariate(self.rate_per_s) for _ in range(num_requests))


LoadPattern: TypeAlias = ClosedLoop | Passes | OpenLoop | RandomArrivals


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The requests to send, and their times.

    Attributes:
        requests: whole requests as bytes; they are sent in turns.
        pattern: when they are sent.
        timeout_s: of a request.
        watch_s: look at /readyz so often, as a load balancer does, and send nothing new once it is
            not 200; None: do not look.
    """

    port: int
    requests: Sequence[bytes]
    pattern: LoadPattern
    timeout_s: float = 70.0
    watch_s: float | None = None
