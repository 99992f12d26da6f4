"""Measurement of services in turns, with the same requests."""

from __future__ import annotations

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
from benchmarks.serve.stream import PeerSettings, ServedModel, Stream, peer_service

# Untimed, for each process of a service that has started: BentoML's batching learns from the first
# 11 batches of each API, and makes them wait.
_NUM_WARM_UP: Final = 32
_WARM_UP_CONNECTIONS: Final = 2
# For the choice of settings: as many requests at as many connections.
_NUM_TRIED: Final = 48
_TRIED_CONNECTIONS: Final = 16
_TIMEOUT_S: Final = 600.0
# Of the peer's throughput, for requests that come at random.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class TriedSettings:
    """Settings of the peer, and the requests a second that they gave."""

    settings: PeerSettings
    per_s: float


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

    def choose_peer(
        self, checkpoint: Path, candidates: Sequence[PeerSettings]
    ) -> tuple[ServedModel, list[TriedSettings]]:
        """The peer with the settings that are best for it, fastest of all tried first."""
        tasks = list(dict.fromkeys(item.task for item in self.stream.items))
        trials: list[tuple[TriedSettings, ServedModel]] = []
        for settings in candidates:
            service = peer_service(checkpoint, tasks, settings, self.num_threads)
            self._tell(f"trying {settings}")
            with service.running(self.folder / "peer") as process:
                requests = self._requests(service)
                _warm_up(process.port, requests, service.num_workers)
                pattern = ClosedLoop(num_connections=_TRIED_CONNECTIONS, in_passes=True)
                measured = _send(process.port, requests[:_NUM_TRIED], pattern)
            # What fails is no answer: settings that shed load do not win by it.
            trials.append((TriedSettings(settings=settings, per_s=measured.per_s), service))
            self.bar.update()
        trials.sort(key=lambda pair: -pair[0].per_s)
        return trials[0][1], [tried for tried, _ in trials]

    def run(self, services: Sequence[ServedModel], rate_per_s: float) -> list[ServedResult]:
        """Measure all services, in each round in another order.

        Args:
            rate_per_s: of the requests that come at random.

        Raises:
            BenchmarkError: a service does not start, or the engine fails.
        """
        results = [ServedResult(service=service) for service in services]
        for number in range(self.rounds):
            first = number % len(results)
            for result in [*results[first:], *results[:first]]:
                self._round(result, rate_per_s)
        return results

    def _round(self, result: ServedResult, rate_per_s: float) -> None:
        service = result.service
        self._tell(f"{service.name}: starting")
        with service.running(self.folder / service.name.replace(" ", "-")) as process:
            port, requests = process.port, self._requests(service)
            _warm_up(port, requests, service.num_workers)
            for level in self.levels:
                self._tell(f"{service.name}: {level} connections")
                measured = _send(port, requests, self._passes(level))
                result.levels.setdefault(level, []).append(measured)
                self.bar.update()
            self._tell(f"{service.name}: {rate_per_s:.1f} requests/s")
            result.arrivals.append(_send(port, requests, OpenLoop(rate_per_s=rate_per_s)))
            self.bar.update()
            if service.bundle is not None:
                self._tell(f"{service.name}: the engine alone")
                result.alone.append(
                    run_in_process(
                        measure_alone, self._comparison(service, service.bundle, process.url)
                    )
                )
                result.saturated.append(_send(port, requests, self._passes(max(self.levels))))
                self.bar.update()

    def num_loads(self, num_candidates: int, num_services: int) -> int:
        """Return the number of loads, the bar's total, with one peer among the services."""
        return num_candidates + self.rounds * (num_services * (len(self.levels) + 2) - 1)

    def _requests(self, service: ServedModel) -> list[bytes]:
        return [http_request(*service.call(item)) for item in self.stream.items]

    def _passes(self, num_connections: int) -> ClosedLoop:
        return ClosedLoop(num_connections=num_connections, duration_s=self.least_s, in_passes=True)

    def _comparison(self, service: ServedModel, bundle: Path, url: str) -> Comparison:
        idle = {
            str(length): [service.call(item) for item in items]
            for length, items in self.stream.idle.items()
        }
        return Comparison(
            bundle=bundle.absolute(),
            num_threads=self.num_threads,
            url=url,
            calls=[service.call(item) for item in self.stream.items],
            idle=idle,
        )

    def _tell(self, what: str) -> None:
        self.bar.set_postfix_str(what)


def _send(port: int, requests: Sequence[bytes], pattern: LoadPattern) -> LoadResult:
    return load(LoadPlan(port=port, requests=requests, pattern=pattern, timeout_s=_TIMEOUT_S))


def _warm_up(port: int, requests: Sequence[bytes], num_workers: int) -> None:
    some = [*islice(cycle(requests), _NUM_WARM_UP * num_workers)]
    _send(
        port, some, ClosedLoop(num_connections=_WARM_UP_CONNECTIONS * num_workers, in_passes=True)
    )
