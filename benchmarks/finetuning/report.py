"""Results of a case as a table for people, and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from benchmarks.finetuning.jobs import Case
from benchmarks.harness.tables import table
from benchmarks.pretraining.contest import Result
from benchmarks.pretraining.jobs import Turn

_GB: Final = 1e9
_HEADINGS: Final = ("examples/s", "tokens/s", "memory", "warm-up", "ours is faster", "by CPU time")


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The results of one case.

    Attributes:
        mean_tokens: of an example. Turns see short and long ones in different parts, so that
            examples a second are tokens a second over it.
        results: of ours first.
    """

    case: Case
    mean_tokens: float
    results: Sequence[Result]

    def markdown(self) -> str:
        """A table, with its title."""
        title = f"{self.case}; {self.mean_tokens:.0f} tokens on average"
        return f"{title}\n\n{table(['', *_HEADINGS], [self._row(each) for each in self.results])}\n"

    def ratio(self, result: Result, rate: Callable[[Turn], float]) -> float:
        """Return the median of the rounds' ratios of ours to a result."""
        pairs = zip(self.results[0].turns, result.turns, strict=True)
        return statistics.median(rate(ours) / rate(theirs) for ours, theirs in pairs)

    def _row(self, result: Result) -> list[str]:
        name = result.job.name
        if not result.turns:
            return [name, "failed", *[""] * (len(_HEADINGS) - 1)]
        cells = [
            f"{result.tokens_per_s / self.mean_tokens:,.1f}",
            f"{result.tokens_per_s:,.0f}",
            f"{result.peak_bytes / _GB:.1f} GB",
            f"{result.warm_up_s:.0f} s",
        ]
        if result is self.results[0]:
            return [f"**{name}**", *cells, "", ""]
        ratio = self.ratio(result, lambda turn: turn.tokens_per_s)
        by_cpu = self.ratio(result, lambda turn: turn.tokens_per_cpu_s)
        is_on_cpu = result.job.device == "cpu"
        return [name, *cells, f"{ratio:.2f}x", f"{by_cpu:.2f}x" if is_on_cpu else ""]

    def to_dict(self) -> dict[str, Any]:
        """All numbers, single turns included."""
        return {
            "case": asdict(self.case),
            "mean_tokens": self.mean_tokens,
            "results": [
                {
                    "name": result.job.name,
                    "warm_up_s": result.warm_up_s,
                    "turns": [asdict(turn) for turn in result.turns],
                    "failure": result.failure,
                }
                for result in self.results
            ],
        }
