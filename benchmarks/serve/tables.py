"""The services' results: derived figures, tables for people, and all numbers as JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from benchmarks.harness.load import LoadResult
from benchmarks.harness.page import bullets, table
from benchmarks.serve.services import ServedModel, StreamItem

# Of the peer's throughput in the first round, for requests that come at random.
ARRIVAL_PART: Final = 0.8
# Of the best throughput: more connections than reach it only make everybody wait.
_SATURATED: Final = 0.95
_NONE: Final = "–"


@dataclass(kw_only=True, slots=True)
class ServedResult:
    """The measurements of one service.

    Attributes:
        levels: by number of connections, one of each round.
        arrivals: requests at random times, one of each round.
    """

    service: ServedModel
    levels: dict[int, list[LoadResult]] = field(default_factory=dict)
    arrivals: list[LoadResult] = field(default_factory=list)

    def runs(self) -> Iterator[LoadResult]:
        """All loads that were timed."""
        for runs in self.levels.values():
            yield from runs
        yield from self.arrivals

    def per_s(self, level: int) -> float:
        """Requests a second at a level, the median over rounds."""
        return statistics.median(run.per_s for run in self.levels[level])

    def saturation(self) -> tuple[int, float]:
        """The fewest connections that reach nearly the best throughput, and that throughput."""
        rates = {level: self.per_s(level) for level in self.levels}
        best = max(rates.values())
        return min(level for level, rate in rates.items() if rate >= _SATURATED * best), best

    def best_within(self, most_s: float) -> tuple[int, float] | None:
        """Return the connections with the best throughput within a p99, and that throughput."""
        rates = {
            level: self.per_s(level)
            for level, runs in self.levels.items()
            if _latency_s(runs, 99) <= most_s
        }
        return max(rates.items(), key=lambda pair: pair[1]) if rates else None


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
        sections = [
            bullets([*self.machine, _describe(self.stream)]),
            "### Throughput at the peer's p99",
            _summary(self.results),
            "### By connections",
            _levels(self.results),
            "### Requests at random times",
            table(
                ["", "p50, ms", "p99, ms"],
                [[one.service.name, *_latencies(one.arrivals)] for one in self.results],
            ),
            "### Notes",
            bullets(_notes(self.results)),
        ]
        return "\n\n".join(sections) + "\n"


def _summary(results: Sequence[ServedResult]) -> str:
    peer, *ours = results
    level, best = peer.saturation()
    most_s = _latency_s(peer.levels[level], 99)
    cells = [f"{best:.1f}", str(level), _ms(most_s), "1"]
    rows = [[peer.service.name, *cells, _failed(peer)]]
    for one in ours:
        within = one.best_within(most_s)
        cells = [_NONE] * 4
        if within is not None:
            p99_s = _latency_s(one.levels[within[0]], 99)
            cells = [f"{within[1]:.1f}", str(within[0]), _ms(p99_s), f"**{within[1] / best:.2f}**"]
        rows.append([f"**{one.service.name}**", *cells, _failed(one)])
    return table(
        ["", "requests/s", "connections", "p99, ms", "times the peer", "failed of all"], rows
    )


def _levels(results: Sequence[ServedResult]) -> str:
    headings = ["connections"]
    for one in results:
        headings += [f"{one.service.name}: requests/s", "p50, ms", "p99, ms"]
    rows = []
    for level in results[0].levels:
        cells = [str(level)]
        for one in results:
            cells += [f"{one.per_s(level):.1f}", *_latencies(one.levels[level])]
        rows.append(cells)
    return table(headings, rows)


def _notes(results: Sequence[ServedResult]) -> Iterator[str]:
    peer, *ours = results
    yield (
        f"the peer's p99 is that at {peer.saturation()[0]} connections, the fewest with which it "
        "reaches 95 % of its best throughput; each of ours has the best of its levels with a p99 "
        "no longer"
    )
    yield f"requests at random times: {ARRIVAL_PART:.0%} of the peer's best in the first round"
    for one in ours:
        difference = _largest_difference(peer, one)
        yield f"{one.service.name}: scores at most {difference:.1e} from the peer's"
    shares = [run.cpu_s / run.seconds for one in results for run in one.runs()]
    yield f"the process that sent the requests took {max(shares):.2f} CPUs at most"
    for one in results:
        for failure in dict.fromkeys(text for run in one.runs() for text in run.failures):
            yield f"{one.service.name}: {failure}"


def _describe(stream: Sequence[StreamItem]) -> str:
    lengths = [item.num_tokens for item in stream]
    tasks = ", ".join(dict.fromkeys(item.task for item in stream))
    return (
        f"{len(lengths)} requests of one text each, {min(lengths)} to {max(lengths)} tokens "
        f"({statistics.fmean(lengths):.0f} on average), by turns {tasks}"
    )


def _failed(result: ServedResult) -> str:
    num_all = sum(len(run.replies) for run in result.runs())
    return f"{sum(len(run.failures) for run in result.runs())} of {num_all:,}"


def _latencies(runs: Sequence[LoadResult]) -> list[str]:
    return [_ms(_latency_s(runs, percent)) for percent in (50, 99)]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.1f}"


def _latency_s(runs: Sequence[LoadResult], percent: float) -> float:
    """Return the latency of all rounds' requests together; NaN if none was answered."""
    latencies_s = [each for run in runs for each in run.latencies_s]
    return float(np.percentile(latencies_s, percent)) if latencies_s else float("nan")


def _largest_difference(peer: ServedResult, ours: ServedResult) -> float:
    """Between the scores of the peer's best answers and ours to the same requests."""
    theirs, our = (next(iter(one.levels.values()))[0].bodies for one in (peer, ours))
    largest = 0.0
    for at in theirs.keys() & our.keys():
        [best] = json.loads(theirs[at])
        best = best[0] if isinstance(best, list) else best
        answers = json.loads(our[at])
        answers = answers[0] if isinstance(answers[0], list) else answers
        key = "label" if "label" in best else "token"
        scores = [one["score"] for one in answers if one[key] == best[key]]
        largest = max(largest, abs(best["score"] - (scores[0] if scores else 0.0)))
    return largest
