"""Measurement of services in turns, with the same requests."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Final

from tqdm import tqdm

from benchmarks.harness.load import (
    ClosedLoop,
    LoadPattern,
    LoadPlan,
    LoadResult,
    OpenLoop,
    http_request,
    load,
)
from benchmarks.harness.process import run_in_process
from benchmarks.serve.in_process import Alone, Comparison, measure_alone
from benchmarks.serve.stream import ServedModel, Stream

# Untimed, when a service has started: BentoML's batching learns from the first 11 batches of each
# API, and makes them wait.
_WARM_UP: Final = ClosedLoop(num_connections=2, in_passes=True)
_NUM_WARM_UP: Final = 32
_TIMEOUT_S: Final = 600.0
# Of the peer's throughput in the first round, for requests that come at random.
ARRIVAL_PART: Final = 0.8


@dataclass(kw_only=True, slots=True)
class ServedResult:
    """The measurements of one service.

    Attributes:
        levels: by number of connections, one of each round.
        arrivals: requests at random times, one of each round.
        saturated: the stream again, right after the engine ran it alone.
        alone: the engine of the same bundle in process, for ours.
    """

    service: ServedModel
    levels: dict[int, list[LoadResult]] = field(default_factory=dict)
    arrivals: list[LoadResult] = field(default_factory=list)
    saturated: list[LoadResult] = field(default_factory=list)
    alone: list[Alone] = field(default_factory=list)

    def runs(self) -> Iterator[LoadResult]:
        """All loads that were timed."""
        for runs in self.levels.values():
            yield from runs
        yield from self.arrivals
        yield from self.saturated

    def per_s(self, level: int) -> float:
        """Requests a second at a level, the median over rounds."""
        return statistics.median(run.per_s for run in self.levels[level])


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeContest:
    """The measurement of services in turns.

    Attributes:
        levels: numbers of connections.
        least_s: of passes over the stream at each level.
        folder: takes the services' logs.
        bar: progress, in loads.
    """

    stream: Stream
    levels: Sequence[int]
    rounds: int
    least_s: float
    num_threads: int
    folder: Path
    bar: tqdm[Any]

    def run(self, services: Sequence[ServedModel]) -> list[ServedResult]:
        """Measure all services, the peer first; in each round in another order.

        Raises:
            BenchmarkError: a service does not start, or the engine fails.
        """
        results = [ServedResult(service=service) for service in services]
        self.bar.reset(self.rounds * len(services) * (len(self.levels) + 2))
        rate_per_s = 0.0
        for number in range(self.rounds):
            first = number % len(results)
            for result in [*results[first:], *results[:first]]:
                rate_per_s = self._round(result, rate_per_s)
        return results

    def _round(self, result: ServedResult, rate_per_s: float) -> float:
        """Measure a service once; return the rate of arrivals at random, that of the first one's.

        Args:
            rate_per_s: of the service that was measured first; 0 if this is it.
        """
        service = result.service
        self._show(service, "starting")
        with service.running(self.folder / service.name.replace(" ", "-")) as process:
            requests = [http_request(*service.call(item)) for item in self.stream.items]

            def send(pattern: LoadPattern, requests: Sequence[bytes] = requests) -> LoadResult:
                plan = LoadPlan(
                    port=process.port, requests=requests, pattern=pattern, timeout_s=_TIMEOUT_S
                )
                return load(plan)

            send(_WARM_UP, [*islice(cycle(requests), _NUM_WARM_UP)])
            for level in self.levels:
                self._show(service, f"{level} connections")
                result.levels.setdefault(level, []).append(send(self._passes(level)))
            rate_per_s = rate_per_s or ARRIVAL_PART * max(map(result.per_s, self.levels))
            self._show(service, f"{rate_per_s:.1f} requests/s")
            result.arrivals.append(send(OpenLoop(rate_per_s=rate_per_s)))
            self._show(service, "the engine alone")
            if service.bundle is not None:
                comparison = self._comparison(service, service.bundle, process.port)
                result.alone.append(run_in_process(measure_alone, comparison))
                result.saturated.append(send(self._passes(max(self.levels))))
        return rate_per_s

    def _passes(self, num_connections: int) -> ClosedLoop:
        return ClosedLoop(num_connections=num_connections, duration_s=self.least_s, in_passes=True)

    def _comparison(self, service: ServedModel, bundle: Path, port: int) -> Comparison:
        return Comparison(
            bundle=bundle.absolute(),
            num_threads=self.num_threads,
            port=port,
            calls=[service.call(item) for item in self.stream.items],
            idle={
                length: [service.call(item) for item in items]
                for length, items in self.stream.idle.items()
            },
        )

    def _show(self, service: ServedModel, what: str) -> None:
        self.bar.set_postfix_str(f"{service.name}: {what}")
        self.bar.update()
