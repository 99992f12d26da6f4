"""The services' results as tables."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from benchmarks.harness.page import bullets, median_of, ratios, table
from benchmarks.serve.load import LoadResult
from benchmarks.serve.services import ServedModel, StreamItem

# Share of the best throughput, beyond which more connections mainly add latency.
_SATURATED: Final = 0.95


@dataclass(kw_only=True, slots=True)
class ServedResult:
    """The measurements of one service.

    Attributes:
        levels: results of each round, by number of connections.
    """

    service: ServedModel
    levels: dict[int, list[LoadResult]] = field(default_factory=dict)

    def rates(self, level: int) -> list[float]:
        """Return the requests per second at a number of connections, by round."""
        return [run.per_s for run in self.levels[level]]

    def per_s(self, level: int) -> float:
        """Return the median of `rates`."""
        return statistics.median(self.rates(level))

    def latency_s(self, level: int, percent: float) -> float:
        """Return a percentile of all rounds' latencies in seconds, or NaN without replies."""
        latencies_s = [value for run in self.levels[level] for value in run.latencies_s]
        return float(np.percentile(latencies_s, percent)) if latencies_s else float("nan")

    def saturation(self) -> int:
        """Return the smallest number of connections that reaches 95 % of the best throughput."""
        rates = {level: self.per_s(level) for level in self.levels}
        return min(level for level in rates if rates[level] >= _SATURATED * max(rates.values()))

    def best_within(self, max_s: float) -> int | None:
        """Return the number of connections with the best throughput at a p99 of at most `max_s`."""
        within = [level for level in self.levels if self.latency_s(level, 99) <= max_s]
        return max(within, key=self.per_s) if within else None

    @property
    def failures(self) -> list[str]:
        """The failures at any number of connections, in all rounds."""
        return [text for runs in self.levels.values() for run in runs for text in run.failures]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeReport:
    """The results of all services.

    Attributes:
        machine: lines about hardware, versions, date and model.
        results: results of each service, the peer first.
    """

    machine: Sequence[str]
    stream: Sequence[StreamItem]
    results: Sequence[ServedResult]

    def markdown(self) -> str:
        """Return all tables and the description of machine and model."""
        failures = [
            f"{result.service.name}: {text}"
            for result in self.results
            for text in dict.fromkeys(result.failures)
        ]
        sections = [
            bullets([*self.machine, _describe(self.stream)]),
            "### Throughput at the peer's p99",
            _summary(self.results),
            "### By connections",
            _levels(self.results),
            *([bullets(failures)] if failures else []),
        ]
        return "\n\n".join(sections) + "\n"


def _summary(results: Sequence[ServedResult]) -> str:
    """Return a table of each service's best throughput within the saturated peer's p99."""
    peer = results[0]
    level = peer.saturation()
    max_s = peer.latency_s(level, 99)
    rows = []
    for result in results:
        within = level if result is peer else result.best_within(max_s)
        cells = ["–"] * 5
        if within is not None:
            cells = [f"{result.per_s(within):.2f}", str(within), _ms(result.latency_s(within, 99))]
            cells += [
                median_of(ratios(result.rates(within), peer.rates(level))),
                f"{_largest_difference(peer, result):.1e}",
            ]
        name = result.service.name if result is peer else f"**{result.service.name}**"
        rows.append([name, *cells, str(len(result.failures))])
    headings = ["requests/s", "connections", "p99, ms", "times the peer", "scores differ by"]
    return table(["", *headings, "failed"], rows)


def _levels(results: Sequence[ServedResult]) -> str:
    headings = ["connections"]
    for result in results:
        headings += [f"{result.service.name}: requests/s", "p50, ms", "p99, ms"]
    rows = []
    for level in results[0].levels:
        cells = [str(level)]
        for result in results:
            latencies = [_ms(result.latency_s(level, percent)) for percent in (50, 99)]
            cells += [f"{result.per_s(level):.2f}", *latencies]
        rows.append(cells)
    return table(headings, rows)


def _describe(stream: Sequence[StreamItem]) -> str:
    lengths = [item.num_tokens for item in stream]
    tasks = ", ".join(dict.fromkeys(item.task for item in stream))
    return (
        f"{len(lengths)} requests of {len(stream[0].texts)} texts, {min(lengths)} to "
        f"{max(lengths)} tokens per request ({statistics.fmean(lengths):.0f} on average), by turns "
        f"{tasks}"
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.1f}"


def _largest_difference(peer: ServedResult, result: ServedResult) -> float:
    """Return the largest difference between a service's and the peer's best scores."""
    peer_bodies, bodies = (next(iter(side.levels.values()))[0].bodies for side in (peer, result))
    largest = 0.0
    for index in peer_bodies.keys() & bodies.keys():
        pairs = zip(json.loads(peer_bodies[index]), json.loads(bodies[index]), strict=True)
        for [best, *_], answers in (map(_as_list, pair) for pair in pairs):
            key = "label" if "label" in best else "token"
            scores = [answer["score"] for answer in answers if answer[key] == best[key]]
            largest = max(largest, abs(best["score"] - (scores[0] if scores else 0.0)))
    return largest


def _as_list(answer: dict[str, Any] | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return answer if isinstance(answer, list) else [answer]
