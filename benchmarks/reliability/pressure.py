"""More than the service can do, for a minute; nearly as much as it can do, for an hour."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks.harness.load import load
from benchmarks.harness.plan import ClosedLoop, LoadPattern, OpenLoop, Plan
from benchmarks.harness.replies import LoadResult
from benchmarks.reliability.host import (
    BundleLink,
    Service,
    growth,
    mixed_requests,
    revision_of,
    serving,
    short_requests,
)
from benchmarks.reliability.report import Result

# The last is well past where more connections mean more replies.
_CONCURRENCIES: Final = (1, 4, 16, 64)
_MOST_GROWTH: Final = 0.05
_FEW_CLIENTS: Final = 16
_MANY_CLIENTS: Final = 512
_LEAST_GOODPUT: Final = 0.85
_LONGEST_REPLY_S: Final = 2.0
# Nothing is refused and nothing is late, as far as the settings go.
_PATIENT: Final = {"DEADLINE_S": "55", "MAX_WAIT_S": "55", "MAX_QUEUE_TOKENS": "100000000"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The settings of scenarios.

    Attributes:
        bundle: to serve; None for the shipped one.
        folder: for logs.
        seconds: of the main part of a scenario, three times that of overload, not of the soak.
        minutes: of the soak.
    """

    bundle: Path | None
    folder: Path
    seconds: float
    minutes: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """The service's maximum throughput, with no limit on waiting.

    Attributes:
        per_s: replies a second with as many connections as are tried at most.
        p99_ms: with these.
        levels: replies a second, p50 and p99 in ms, by the number of connections.
    """

    per_s: float
    p99_ms: float
    levels: dict[int, tuple[float, float, float]]
    num_others: int


def measure_capacity(
    setting: Setting, concurrencies: Sequence[int] = _CONCURRENCIES, turn_s: float = 0.0
) -> Capacity:
    """Closed loop: each connection asks again when it has its reply.

    Args:
        concurrencies: connections, for a turn each.
        turn_s: of a turn, at least; a machine that works for an hour is slower than one that has
            just begun.
    """
    turn_s = max(1.0, setting.seconds / 6, turn_s)
    with serving(setting.bundle, setting.folder / "capacity", _PATIENT) as service:
        load(_plan(service, ClosedLoop(num_connections=8, duration_s=turn_s)))  # warm
        results = {
            num: load(_plan(service, ClosedLoop(num_connections=num, duration_s=turn_s)))
            for num in concurrencies
        }
    levels = {
        num: (result.num(200) / turn_s, result.latency_ms(50), result.latency_ms(99))
        for num, result in results.items()
    }
    per_s, _, p99_ms = levels[concurrencies[-1]]
    return Capacity(
        per_s=per_s,
        p99_ms=p99_ms,
        levels=levels,
        num_others=sum(result.num_others for result in results.values()),
    )


def capacity(setting: Setting) -> Result:
    """Closed loop."""
    capacity = measure_capacity(setting)
    return Result(
        name="capacity",
        figures={
            f"{num} connections": f"{per_s:.0f}/s, p50 {p50_ms:.0f} ms, p99 {p99_ms:.0f} ms"
            for num, (per_s, p50_ms, p99_ms) in capacity.levels.items()
        },
        checks={"every reply is 200": capacity.num_others == 0},
    )


def overload(setting: Setting, times: float = 10.0) -> Result:
    """Open loop at ten times of the capacity."""
    at_capacity = measure_capacity(setting)
    rate_per_s, seconds = times * at_capacity.per_s, 3 * setting.seconds
    # Refusals are delayed by up to a second, and hold their connections.
    num_connections = max(1000, int(3 * rate_per_s))

    def at_rate(duration_s: float) -> OpenLoop:
        return OpenLoop(
            rate_per_s=rate_per_s, duration_s=duration_s, num_connections=num_connections
        )

    with serving(setting.bundle, setting.folder / "overload") as service:
        # What a full service holds is held from the start.
        warm_up_s = max(2.0, seconds / 3)
        load(_plan(service, at_rate(warm_up_s)))
        before_mb = service.pss_mb
        with sampling(service, every_s=max(0.1, seconds / 60)) as samples_mb:
            result = load(_plan(service, at_rate(seconds)))
        after_mb = service.pss_mb
    p99_ms = result.latency_ms(99)
    grown = growth(samples_mb)
    return Result(
        name="overload",
        figures={
            "offered/s": f"{rate_per_s:.0f}",
            "replies": counted(result),
            "answered/s": f"{result.num(200) / seconds:.0f}",
            "p99 at capacity, ms": f"{at_capacity.p99_ms:.0f}",
            "p50 of 200, ms": f"{result.latency_ms(50):.0f}",
            "p99 of 200, ms": f"{p99_ms:.0f}",
            "p99 of 429, ms": f"{result.latency_ms(99, 429):.0f}",
            "memory before, most, after, MB": (
                f"{before_mb:.0f}, {max(samples_mb):.0f}, {after_mb:.0f}"
            ),
        },
        checks={
            "every reply is 200 or 429": result.num_others == 0,
            "every 429 has Retry-After": result.num_bad_refusals == 0,
            "some are answered": result.num(200) > 0,
            "p99 of the accepted under twice that at capacity": p99_ms < 2 * at_capacity.p99_ms,
            "memory within 5 %": abs(grown) <= _MOST_GROWTH,
        },
    )


def retries(setting: Setting, rounds: int = 3) -> Result:
    """512 clients that ignore Retry-After and ask again at once, against 16 clients.

    Both levels take turns on one service, so that a change of the machine's speed meets both.
    """
    turn_s = max(2.0, setting.seconds / 2)
    few: list[LoadResult] = []
    many: list[LoadResult] = []
    with serving(setting.bundle, setting.folder / "retries") as service:
        load(_short_texts(service, _FEW_CLIENTS, turn_s))  # warm
        for _ in range(rounds):
            few.append(load(_short_texts(service, _FEW_CLIENTS, turn_s)))
            many.append(load(_short_texts(service, _MANY_CLIENTS, turn_s)))
    few_per_s, many_per_s = (median(each.per_s for each in level) for level in (few, many))
    longest_s = max(reply.latency_s for outcome in many for reply in outcome.replies)
    refused_per_s = sum(each.num(429) for each in many) / sum(each.seconds for each in many)
    return Result(
        name="retries",
        figures={
            f"answered/s of {_FEW_CLIENTS} clients": f"{few_per_s:.0f}",
            f"answered/s of {_MANY_CLIENTS} clients": f"{many_per_s:.0f}",
            "refused/s": f"{refused_per_s:.0f}",
            "p50 of 200, ms": f"{median(each.latency_ms(50) for each in many):.0f}",
            "p99 of 200, ms": f"{max(each.latency_ms(99) for each in many):.0f}",
            "p50 of 429, ms": f"{median(each.latency_ms(50, 429) for each in many):.0f}",
            "longest reply, ms": f"{longest_s * 1000:.0f}",
        },
        checks={
            f"at least 85 % of the replies of {_FEW_CLIENTS} clients": (
                many_per_s >= _LEAST_GOODPUT * few_per_s
            ),
            "no reply takes over 2 s": longest_s <= _LONGEST_REPLY_S,
            "every reply is 200 or 429": all(each.num_others == 0 for each in few + many),
        },
    )


def soak(setting: Setting) -> Result:
    """80 % of the capacity, with a reload in the middle."""
    soak_s = setting.minutes * 60
    at_capacity = measure_capacity(setting, _CONCURRENCIES[-1:], turn_s=soak_s / 30)
    rate_per_s = 0.8 * at_capacity.per_s
    every_s = min(10.0, soak_s / 40)
    bundles = BundleLink.make(setting.bundle, setting.folder / "soak")
    with serving(bundles.link, setting.folder / "soak") as service:

        def change() -> None:
            bundles.put("other")
            service.process.send_signal(signal.SIGHUP)

        reloading = threading.Timer(soak_s / 2, change)
        reloading.start()
        with sampling(service, every_s=every_s) as samples_mb:
            pattern = OpenLoop(rate_per_s=rate_per_s, duration_s=soak_s)
            result = load(_plan(service, pattern))
        reloading.cancel()
        is_changed = service.revision == revision_of(bundles.folder / "other")
    grown = growth(samples_mb)
    step = max(1, len(samples_mb) // 12)
    return Result(
        name="soak",
        figures={
            "minutes": f"{setting.minutes:g}",
            "requests/s at capacity": f"{at_capacity.per_s:.0f}",
            "requests/s": f"{rate_per_s:.0f}",
            "replies": counted(result),
            "p50, ms": f"{result.latency_ms(50):.0f}",
            "p99, ms": f"{result.latency_ms(99):.0f}",
            "memory grew by": f"{grown:+.1%}",
        },
        checks={
            "memory within 5 %": abs(grown) <= _MOST_GROWTH,
            "every reply is 200 or 429": result.num_others == 0,
            "fewer than 1 % are refused": result.num(429) < 0.01 * len(result.replies),
            "the other bundle was taken": is_changed,
        },
        curve=[(at * every_s / 60, samples_mb[at]) for at in range(0, len(samples_mb), step)],
    )


def counted(result: LoadResult) -> str:
    """Return the counts of replies by status, with the problems of failed ones."""
    text = ", ".join(f"{num} x {status or 'none'}" for status, num in result.statuses.items())
    return f"{text} {result.problems}" if result.problems else text


@contextmanager
def sampling(service: Service, *, every_s: float) -> Iterator[list[float]]:
    """Look at the service's memory, in MB, again and again."""
    samples_mb = [service.pss_mb]
    done = threading.Event()

    def look() -> None:
        while not done.wait(every_s):
            samples_mb.append(service.pss_mb)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield samples_mb
    finally:
        done.set()
        thread.join()


def _short_texts(service: Service, num_connections: int, duration_s: float) -> Plan:
    pattern = ClosedLoop(num_connections=num_connections, duration_s=duration_s)
    return Plan(port=service.port, requests=short_requests(), pattern=pattern)


def _plan(service: Service, pattern: LoadPattern) -> Plan:
    requests = mixed_requests(seed=time.time_ns())
    return Plan(port=service.port, requests=requests, pattern=pattern)
