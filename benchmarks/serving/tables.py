"""A report as tables for people, and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.harness.replies import LoadResult
from benchmarks.harness.tables import bullets, table, write_between
from benchmarks.serving.contest import ARRIVAL_PART, Result, Tried
from benchmarks.serving.figures import (
    best_within,
    failed,
    idle_ms,
    largest_difference,
    latency_s,
    part_of_engine,
    per_s,
    saturation,
)
from benchmarks.serving.stream import Stream

_BEGIN: Final = "<!-- written by make bench-serve: begin -->"
_END: Final = "<!-- written by make bench-serve: end -->"
_NONE: Final = "–"


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All that was measured.

    Attributes:
        machine: hardware, versions and date, a line each.
        model: description of the served model.
        results: of the peer first.
        tried: settings of the peer, best first.
        rate_per_s: of the requests that came at random.
    """

    machine: Sequence[str]
    model: str
    stream: Stream
    results: Sequence[Result]
    tried: Sequence[Tried]
    rate_per_s: float

    @property
    def peer(self) -> Result:
        """The service that ours is compared with."""
        return self.results[0]

    @property
    def ours(self) -> Sequence[Result]:
        """Our services."""
        return self.results[1:]


def markdown(report: Report) -> str:
    """Return all tables, with the description of machine and model."""
    sections = [
        bullets([*report.machine, report.model, _stream(report.stream)]),
        "### Throughput at the peer's p99",
        _summary(report),
        "### By connections",
        _levels(report),
        f"### Requests at random times, {report.rate_per_s:.1f} a second",
        _arrivals(report),
        "### HTTP and the engine alone",
        _throughputs(report),
        _idle(report),
        "### Notes",
        bullets(_notes(report)),
    ]
    return "\n\n".join(sections) + "\n"


def to_dict(report: Report) -> dict[str, Any]:
    """Everything but the replies, for `--json`."""
    return {
        "machine": list(report.machine),
        "model": report.model,
        "num_tokens": [item.num_tokens for item in report.stream.items],
        "tried": [asdict(one) for one in report.tried],
        "rate_per_s": report.rate_per_s,
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


def write_tables(page: Path, tables: str) -> None:
    """Replace the tables of an earlier run.

    Raises:
        BenchmarkError: the page does not have both markers.
        OSError: it cannot be read or written.
    """
    write_between(page, _BEGIN, _END, tables)


def _summary(report: Report) -> str:
    level, best = saturation(report.peer)
    most_s = latency_s(report.peer.levels[level], 99)
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
            p99_s = latency_s(one.levels[within[0]], 99)
            cells = [f"{within[1]:.1f}", str(within[0]), _ms(p99_s), f"**{within[1] / best:.2f}**"]
        rows.append([f"**{one.service.name}**", *cells, _failed(one)])
    return table(
        ["", "requests/s", "connections", "p99, ms", "times the peer", "failed of all"], rows
    )


def _levels(report: Report) -> str:
    headings = ["connections"]
    for one in report.results:
        headings += [f"{one.service.name}: requests/s", "p50, ms", "p99, ms"]
    rows = []
    for level in report.peer.levels:
        cells = [str(level)]
        for one in report.results:
            cells += [f"{per_s(one.levels[level]):.1f}", *_latencies(one.levels[level])]
        rows.append(cells)
    return table(headings, rows)


def _arrivals(report: Report) -> str:
    rows = [[one.service.name, *_latencies(one.arrivals)] for one in report.results]
    return table(["", "p50, ms", "p99, ms"], rows)


def _throughputs(report: Report) -> str:
    num_items = len(report.stream.items)
    rows = [
        [
            one.service.name,
            f"{num_items / statistics.median(each.engine_s for each in one.alone):.1f}",
            f"{num_items / statistics.median(each.stream_s for each in one.alone):.1f}",
            f"{per_s(one.saturated):.1f}",
            f"**{part_of_engine(one, num_items):.0%}**",
        ]
        for one in report.ours
    ]
    with_tasks = "with tokeniser and answers"
    return table(["requests/s", "engine alone", with_tasks, "over HTTP", "HTTP of engine"], rows)


def _idle(report: Report) -> str:
    rows = []
    for one in report.ours:
        for length in report.stream.idle:
            over_http, alone, overhead = idle_ms(one, str(length))
            name = f"{one.service.name}, {length} tokens"
            rows.append([name, f"{over_http:.2f}", f"{alone:.2f}", f"**{overhead:.2f}**"])
    return table(
        ["p50 of one request at a time, ms", "over HTTP", "tokeniser and engine", "between"], rows
    )


def _notes(report: Report) -> Iterator[str]:
    level, _ = saturation(report.peer)
    yield (
        f"the peer's p99 is that at {level} connections, the fewest with which it reaches 95 % of "
        "its best throughput; each of ours has the best of its levels with a p99 no longer"
    )
    tried = "; ".join(f"{one.settings}: {one.per_s:.1f}" for one in report.tried)
    yield f"settings of the peer that were tried, requests/s, of which the best was taken: {tried}"
    yield f"requests at random times: {ARRIVAL_PART:.0%} of what the peer managed when tried"
    for one in report.ours:
        difference = largest_difference(report.peer, one)
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
            "num_failed": run.num_failed,
            "latencies_s": run.latencies_s(),
            "failures": run.failures,
        }
        for run in runs
    ]


def _failed(result: Result) -> str:
    num_failed, num_all = failed(result)
    return f"{num_failed} of {num_all:,}"


def _latencies(runs: Sequence[LoadResult]) -> list[str]:
    return [_ms(latency_s(runs, percent)) for percent in (50, 99)]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.1f}"
