"""Figures derived from the measurements."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from benchmarks.harness.replies import LoadResult
from benchmarks.serving.contest import Result

# Of the best throughput: more connections than reach it only make everybody wait.
_SATURATED: Final = 0.95


def per_s(runs: Sequence[LoadResult]) -> float:
    """Requests a second, the median over rounds."""
    return statistics.median(run.per_s for run in runs)


def latency_s(runs: Sequence[LoadResult], percent: float) -> float:
    """Return the latency of all rounds' requests together; NaN if none was answered."""
    latencies_s = [each for run in runs for each in run.latencies_s()]
    return float(np.percentile(latencies_s, percent)) if latencies_s else float("nan")


def saturation(result: Result) -> tuple[int, float]:
    """The fewest connections that reach nearly the best throughput, and that throughput."""
    rates = {level: per_s(runs) for level, runs in result.levels.items()}
    best = max(rates.values())
    return min(level for level, rate in rates.items() if rate >= _SATURATED * best), best


def best_within(result: Result, most_s: float) -> tuple[int, float] | None:
    """Return the connections with the best throughput within a p99, and that throughput."""
    rates = {
        level: per_s(runs) for level, runs in result.levels.items() if latency_s(runs, 99) <= most_s
    }
    return max(rates.items(), key=lambda pair: pair[1]) if rates else None


def part_of_engine(result: Result, num_items: int) -> float:
    """Throughput over HTTP as a part of the engine's own, the median over rounds.

    Args:
        num_items: of the stream.
    """
    pairs = zip(result.saturated, result.alone, strict=True)
    return statistics.median(run.per_s * one.engine_s / num_items for run, one in pairs)


def idle_ms(result: Result, length: str) -> tuple[float, float, float]:
    """Return median milliseconds over HTTP, of tokeniser and engine, and their difference.

    Each is the median over rounds of a round's p50; so is the difference.
    """
    rounds = [[1e3 * statistics.median(side) for side in one.idle[length]] for one in result.alone]
    over_http, alone = (statistics.median(side) for side in zip(*rounds, strict=True))
    return over_http, alone, statistics.median(both[0] - both[1] for both in rounds)


def failed(result: Result) -> tuple[int, int]:
    """Requests that failed, and all that were sent."""
    num_failed = sum(run.num_failed for run in result.runs())
    return num_failed, sum(len(run.replies) for run in result.runs())


def largest_difference(peer: Result, ours: Result) -> float:
    """Between the scores of both sides' best answers to the same requests."""
    theirs, our = (next(iter(one.levels.values()))[0].bodies for one in (peer, ours))
    pairs = [(json.loads(theirs[at])[0], json.loads(our[at])) for at in theirs.keys() & our.keys()]
    return max(
        (abs(_score(answer, other) - _best(answer)["score"]) for answer, other in pairs),
        default=float("nan"),
    )


def _best(answer: Any) -> Mapping[str, Any]:
    """The first of some answers, or the only one."""
    reply: Mapping[str, Any] = answer[0] if isinstance(answer, list) else answer
    return reply


def _score(theirs: Any, our: Any) -> float:
    """Return our score of the peer's best answer; 0 if it is not among ours."""
    answers = our[0] if isinstance(our[0], list) else our
    key = "label" if "label" in answers[0] else "token"
    best = _best(theirs)
    return next((float(one["score"]) for one in answers if one[key] == best[key]), 0.0)
