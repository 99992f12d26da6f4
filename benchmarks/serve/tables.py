"""The services' results: derived figures, tables for people, and all numbers as JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from benchmarks.harness.load import LoadResult
from benchmarks.harness.page import bullets, table
from benchmarks.serve.contest import ARRIVAL_PART, ServedResult
from benchmarks.serve.stream import Stream

# Of the best throughput: more connections than reach it only make everybody wait.
_SATURATED: Final = 0.95
_NONE: Final = "–"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeReport:
    """All that was measured.

    Attributes:
        machine: hardware, versions and date, a line each.
        model: description of the served model.
        results: of the peer first.
    """

    machine: Sequence[str]
    model: str
    stream: Stream
    results: Sequence[ServedResult]

    @property
    def peer(self) -> ServedResult:
        """The service that ours is compared with."""
        return self.results[0]

    @property
    def ours(self) -> Sequence[ServedResult]:
        """Our services."""
        return self.results[1:]


def markdown(report: ServeReport) -> str:
    """Return all tables, with the description of machine and model."""
    sections = [
        bullets([*report.machine, report.model, _stream(report.stream)]),
        "### Throughput at the peer's p99",
        _summary(report),
        "### By connections",
        _levels(report),
        "### Requests at random times",
        _arrivals(report),
        "### HTTP and the engine alone",
        _throughputs(report),
        _idle(report),
        "### Notes",
        bullets(_notes(report)),
    ]
    return "\n\n".join(sections) + "\n"


def to_dict(report: ServeReport) -> dict[str, Any]:
    """Everything but the replies, for `results.json`."""
    return {
        "machine": list(report.machine),
        "model": report.model,
        "num_tokens": [item.num_tokens for item in report.stream.items],
        "services": [
            {
                "name": one.service.name,
                "levels": {level: _figures(runs) for level, runs in one.levels.items()},
                "arrivals": _figures(one.arrivals),
                "saturated": _figures(one.saturated),
                "alone": [asdict(each) for each in one.alone],
            }
            for one in report.results
        ],
    }


def _summary(report: ServeReport) -> str:
    level, best = saturation(report.peer)
    most_s = _latency_s(report.peer.levels[level], 99)
    rows = [
        [
            report.peer.service.name,
            f"{best:.1f}",
            str(level),
            _ms(most_s),
            "1",
            _failed(report.peer),
        ]
    ]
    for one in report.ours:
        within = best_within(one, most_s)
        cells = [_NONE] * 4
        if within is not None:
            p99_s = _latency_s(one.levels[within[0]], 99)
            cells = [f"{within[1]:.1f}", str(within[0]), _ms(p99_s), f"**{within[1] / best:.2f}**"]
        rows.append([f"**{one.service.name}**", *cells, _failed(one)])
    return table(
        ["", "requests/s", "connections", "p99, ms", "times the peer", "failed of all"], rows
    )


def _levels(report: ServeReport) -> str:
    headings = ["connections"]
    for one in report.results:
        headings += [f"{one.service.name}: requests/s", "p50, ms", "p99, ms"]
    rows = []
    for level in report.peer.levels:
        cells = [str(level)]
        for one in report.results:
            cells += [f"{one.per_s(level):.1f}", *_latencies(one.levels[level])]
        rows.append(cells)
    return table(headings, rows)


def _arrivals(report: ServeReport) -> str:
    rows = [[one.service.name, *_latencies(one.arrivals)] for one in report.results]
    return table(["", "p50, ms", "p99, ms"], rows)


def _throughputs(report: ServeReport) -> str:
    num_items = len(report.stream.items)
    rows = [
        [
            one.service.name,
            f"{num_items / statistics.median(each.engine_s for each in one.alone):.1f}",
            f"{num_items / statistics.median(each.stream_s for each in one.alone):.1f}",
            f"{statistics.median(run.per_s for run in one.saturated):.1f}",
            f"**{_part_of_engine(one, num_items):.0%}**",
        ]
        for one in report.ours
    ]
    with_tasks = "with tokeniser and answers"
    return table(["requests/s", "engine alone", with_tasks, "over HTTP", "HTTP of engine"], rows)


def _idle(report: ServeReport) -> str:
    rows = []
    for one in report.ours:
        for length in report.stream.idle:
            over_http, alone, overhead = _idle_ms(one, length)
            name = f"{one.service.name}, {length} tokens"
            rows.append([name, f"{over_http:.2f}", f"{alone:.2f}", f"**{overhead:.2f}**"])
    return table(
        ["p50 of one request at a time, ms", "over HTTP", "tokeniser and engine", "between"], rows
    )


def _notes(report: ServeReport) -> Iterator[str]:
    level, _ = saturation(report.peer)
    yield (
        f"the peer's p99 is that at {level} connections, the fewest with which it reaches 95 % of "
        "its best throughput; each of ours has the best of its levels with a p99 no longer"
    )
    yield f"requests at random times: {ARRIVAL_PART:.0%} of the peer's best in the first round"
    for one in report.ours:
        difference = _largest_difference(report.peer, one)
        yield f"{one.service.name}: scores at most {difference:.1e} from the peer's"
    shares = [run.cpu_s / run.seconds for one in report.results for run in one.runs()]
    yield f"the process that sent the requests took {max(shares):.2f} CPUs at most"
    for one in report.results:
        for failure in dict.fromkeys(text for run in one.runs() for text in run.failures):
            yield f"{one.service.name}: {failure}"


def _stream(stream: Stream) -> str:
    lengths = [item.num_tokens for item in stream.items]
    tasks = ", ".join(dict.fromkeys(item.task for item in stream.items))
    return (
        f"{len(lengths)} requests of one text each, {min(lengths)} to {max(lengths)} tokens "
        f"({statistics.fmean(lengths):.0f} on average), by turns {tasks}"
    )


def _figures(runs: Sequence[LoadResult]) -> list[dict[str, Any]]:
    return [
        {
            "seconds": run.seconds,
            "cpu_s": run.cpu_s,
            "num_failed": (len(run.replies) - run.num(200)),
            "latencies_s": run.latencies_s(),
            "failures": run.failures,
        }
        for run in runs
    ]


def _failed(result: ServedResult) -> str:
    num_all = sum(len(run.replies) for run in result.runs())
    num_failed = num_all - sum(run.num(200) for run in result.runs())
    return f"{num_failed} of {num_all:,}"


def _latencies(runs: Sequence[LoadResult]) -> list[str]:
    return [_ms(_latency_s(runs, percent)) for percent in (50, 99)]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.1f}"


def _latency_s(runs: Sequence[LoadResult], percent: float) -> float:
    """Return the latency of all rounds' requests together; NaN if none was answered."""
    latencies_s = [each for run in runs for each in run.latencies_s()]
    return float(np.percentile(latencies_s, percent)) if latencies_s else float("nan")


def saturation(result: ServedResult) -> tuple[int, float]:
    """The fewest connections that reach nearly the best throughput, and that throughput."""
    rates = {level: result.per_s(level) for level in result.levels}
    best = max(rates.values())
    return min(level for level, rate in rates.items() if rate >= _SATURATED * best), best


def best_within(result: ServedResult, most_s: float) -> tuple[int, float] | None:
    """Return the connections with the best throughput within a p99, and that throughput."""
    rates = {
        level: result.per_s(level)
        for level, runs in result.levels.items()
        if _latency_s(runs, 99) <= most_s
    }
    return max(rates.items(), key=lambda pair: pair[1]) if rates else None


def _part_of_engine(result: ServedResult, num_items: int) -> float:
    """Throughput over HTTP as a part of the engine's own, the median over rounds.

    Args:
        num_items: of the stream.
    """
    pairs = zip(result.saturated, result.alone, strict=True)
    return statistics.median(run.per_s * one.engine_s / num_items for run, one in pairs)


def _idle_ms(result: ServedResult, length: int) -> tuple[float, float, float]:
    """Return median milliseconds over HTTP, of tokeniser and engine, and their difference.

    Each is the median over rounds of a round's p50; so is the difference.
    """
    rounds = [[1e3 * statistics.median(side) for side in one.idle[length]] for one in result.alone]
    over_http, alone = (statistics.median(side) for side in zip(*rounds, strict=True))
    return over_http, alone, statistics.median(both[0] - both[1] for both in rounds)


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
