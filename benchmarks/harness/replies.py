"""The replies of a service under load."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

import numpy as np

NO_REPLY: Final = 0  # in place of a status: the connection failed, or nothing came


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """The reply to a request, or its failure.

    Attributes:
        due_s: when it was to be sent, on the clock of `time.monotonic`, which processes share.
        latency_s: from then to the end of the reply.
        status: of the reply, or NO_REPLY.
        retry_after: the header's text, if there is one.
        problem: the error, if there is no reply.
    """

    due_s: float
    latency_s: float
    status: int
    retry_after: str | None = None
    problem: str = ""


@dataclass(kw_only=True, slots=True)
class LoadResult:
    """All replies.

    Attributes:
        bodies: of the first reply with status 200 to each request, by the request's index.
        failures: some of the other replies, in words.
        seconds: from the first request to the last reply.
        cpu_s: that sending took.
        stopped_s: when /readyz was seen not to be 200, if it was.
    """

    replies: list[Reply] = field(default_factory=list)
    bodies: dict[int, bytes] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0
    cpu_s: float = 0.0
    stopped_s: float | None = None

    @property
    def statuses(self) -> dict[int, int]:
        """Number of replies by status."""
        return dict(sorted(Counter(reply.status for reply in self.replies).items()))

    def num(self, *statuses: int) -> int:
        """Return the number of replies with one of these statuses."""
        return sum(self.statuses.get(status, 0) for status in statuses)

    @property
    def num_failed(self) -> int:
        """Requests without a reply of status 200."""
        return len(self.replies) - self.num(200)

    @property
    def per_s(self) -> float:
        """Replies of status 200 a second."""
        return self.num(200) / self.seconds

    @property
    def num_others(self) -> int:
        """Replies that are neither 200 nor 429, and requests that have none."""
        return len(self.replies) - self.num(200, 429)

    @property
    def num_bad_refusals(self) -> int:
        """429 without a Retry-After of whole seconds, 1 or more."""
        refusals = (reply.retry_after for reply in self.replies if reply.status == 429)
        return sum(not (text or "").isdecimal() or int(text or 0) < 1 for text in refusals)

    def latencies_s(self, status: int = 200) -> list[float]:
        """Return the latencies of the replies with this status."""
        return [reply.latency_s for reply in self.replies if reply.status == status]

    def latency_ms(self, percentile: float, status: int = 200) -> float:
        """Return a percentile of the latencies with this status; NaN if there are none."""
        latencies_s = self.latencies_s(status)
        return float(np.percentile(latencies_s, percentile)) * 1000 if latencies_s else float("nan")

    @property
    def problems(self) -> dict[str, int]:
        """Return the other replies' problems and statuses, with their counts."""
        others = (reply for reply in self.replies if reply.status not in (200, 429))
        return dict(Counter(reply.problem or str(reply.status) for reply in others))
