"""The services' results as tables."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from benchmarks.harness.page import bullets, table
from benchmarks.serve.load import LoadResult
from benchmarks.serve.services import ServedModel, StreamItem

# Of the best throughput: more connections than reach it only make everybody wait.
_SATURATED: Final = 0.95


@dataclass(kw_only=True, slots=True)
class ServedResult:
    """The measurements of one service.

    Attributes:
        levels: by number of connections, one of each round.
    """

    service: ServedModel
    levels: dict[int, list[LoadResult]] = field(default_factory=dict)

    def per_s(self, level: int) -> float:
        """Requests a second at a level, the median over rounds."""
        return statistics.median(run.per_s for run in self.levels[level])

    def latency_s(self, level: int, percent: float) -> float:
        """Return the latency of all rounds' requests together; NaN if none was answered."""
        latencies_s = [each for run in self.levels[level] for each in run.latencies_s]
        return float(np.percentile(latencies_s, percent)) if latencies_s else float("nan")

    def saturation(self) -> int:
        """The fewest connections that reach nearly the best throughput."""
        rates = {level: self.per_s(level) for level in self.levels}
        return min(level for level in rates if rates[level] >= _SATURATED * max(rates.values()))

    def best_within(self, most_s: float) -> int | None:
        """Return the connections with the best throughput within a p99."""
        within = [level for level in self.levels if self.latency_s(level, 99) <= most_s]
        return max(within, key=self.per_s) if within else None

    @property
    def failures(self) -> list[str]:
        """All failures."""
        return [text for runs in self.levels.values() for run in runs for text in run.failures]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeReport:
    """All that was measured.

    Attributes:
        machine: hardware, versions, date and model, a line each.
        results: of the peer first.
    """

    machine: Sequence[str]
    stream: Sequence[StreamItem]
    results: Sequence[ServedResult]

    def markdown(self) -> str:
        """Return all tables, with the description of machine and model."""
        failures = [
            f"{one.service.name}: {text}"
            for one in self.results
            for text in dict.fromkeys(one.failures)
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
    """Compare throughputs within the peer's p99, which is that of its saturation."""
    peer = results[0]
    level = peer.saturation()
    best, most_s = peer.per_s(level), peer.latency_s(level, 99)
    rows = []
    for one in results:
        within = level if one is peer else one.best_within(most_s)
        cells = ["–"] * 5
        if within is not None:
            cells = [f"{one.per_s(within):.1f}", str(within), _ms(one.latency_s(within, 99))]
            cells += [f"{one.per_s(within) / best:.2f}", f"{_largest_difference(peer, one):.1e}"]
        name = one.service.name if one is peer else f"**{one.service.name}**"
        rows.append([name, *cells, str(len(one.failures))])
    headings = ["requests/s", "connections", "p99, ms", "times the peer", "scores differ by"]
    return table(["", *headings, "failed"], rows)


def _levels(results: Sequence[ServedResult]) -> str:
    headings = ["connections"]
    for one in results:
        headings += [f"{one.service.name}: requests/s", "p50, ms", "p99, ms"]
    rows = []
    for level in results[0].levels:
        cells = [str(level)]
        for one in results:
            latencies = [_ms(one.latency_s(level, percent)) for percent in (50, 99)]
            cells += [f"{one.per_s(level):.1f}", *latencies]
        rows.append(cells)
    return table(headings, rows)


def _describe(stream: Sequence[StreamItem]) -> str:
    lengths = [item.num_tokens for item in stream]
    tasks = ", ".join(dict.fromkeys(item.task for item in stream))
    return (
        f"{len(lengths)} requests of one text each, {min(lengths)} to {max(lengths)} tokens "
        f"({statistics.fmean(lengths):.0f} on average), by turns {tasks}"
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.1f}"


def _largest_difference(peer: ServedResult, other: ServedResult) -> float:
    """Between the scores of the peer's best answers and another's to the same requests."""
    theirs, others = (next(iter(one.levels.values()))[0].bodies for one in (peer, other))
    largest = 0.0
    for index in theirs.keys() & others.keys():
        [best], answers = json.loads(theirs[index]), json.loads(others[index])
        best = best[0] if isinstance(best, list) else best
        answers = answers[0] if isinstance(answers[0], list) else answers
        key = "label" if "label" in best else "token"
        scores = [one["score"] for one in answers if one[key] == best[key]]
        largest = max(largest, abs(best["score"] - (scores[0] if scores else 0.0)))
    return largest
