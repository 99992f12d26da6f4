"""Results as a table for people, as Markdown and as JSON."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
import transformers

from albert_serve.runtime.ort import processor_name
from benchmarks.harness.tables import table
from benchmarks.pretraining.contest import Result
from benchmarks.pretraining.data import Arrays
from benchmarks.pretraining.jobs import Case, Turn
from training.loop.flops import mfu, train_flops_per_token
from training.system.precision import product_dtype

_GB: Final = 1e9
_TERA: Final = 1e12
_HEADINGS: Final = ("tokens/s", "MFU", "memory", "warm-up", "ours is faster", "by CPU time")


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The results of one case.

    Attributes:
        results: of ours first.
        peak_flops: of the device, a second.
        fill: part of a row padded to the full length that is real tokens.
        flops_per_token: of training.
        loading: tokens a second that one process makes ready.
    """

    case: Case
    results: Sequence[Result]
    peak_flops: float
    fill: float
    flops_per_token: float
    loading: float

    @property
    def ours(self) -> Result:
        """Our result."""
        return self.results[0]

    def row(self, result: Result) -> list[str]:
        """The cells of a result, name first."""
        name = "**ours**" if result is self.ours else result.job.name
        if not result.turns:
            return [name, "failed", *[""] * (len(_HEADINGS) - 1)]
        cells = [
            f"{result.tokens_per_s:,.0f}",
            f"{self._mfu(result):.0%}",
            f"{result.peak_bytes / _GB:.1f} GB",
            f"{result.warm_up_s:.0f} s",
        ]
        if result is self.ours:
            return [name, *cells, "", ""]
        ratio = self._ratio(result, lambda turn: turn.tokens_per_s)
        cpu_ratio = self._ratio(result, lambda turn: turn.tokens_per_cpu_s)
        on_cpu = result.job.device == "cpu"
        return [name, *cells, f"{ratio:.2f}x", f"{cpu_ratio:.2f}x" if on_cpu else ""]

    def _ratio(self, result: Result, rate: Callable[[Turn], float]) -> float:
        """Return the median of the rounds' ratios: other load varies little within a round."""
        pairs = zip(self.ours.turns, result.turns, strict=True)
        return statistics.median(rate(ours) / rate(theirs) for ours, theirs in pairs)

    def _mfu(self, result: Result) -> float:
        return mfu(
            tokens_per_s=result.tokens_per_s,
            flops_per_token=self.flops_per_token,
            peak_flops=self.peak_flops,
        )

    @property
    def title(self) -> str:
        """The description of the case."""
        return (
            f"{self.case}; rows padded to the full length would hold {self.fill:.0%} real tokens; "
            f"one process makes {self.loading:,.0f} tokens/s ready, "
            f"{self.loading / self.ours.tokens_per_s:,.0f} times what ours takes"
        )

    def markdown(self) -> str:
        """A table, with its title."""
        rows = [self.row(result) for result in self.results]
        return f"{self.title}\n\n{table(['', *_HEADINGS], rows)}\n"

    def to_dict(self) -> dict[str, Any]:
        """All numbers, single turns included."""
        return {
            "case": asdict(self.case),
            "peak_flops": self.peak_flops,
            "fill": self.fill,
            "flops_per_token": self.flops_per_token,
            "loading_tokens_per_s": self.loading,
            "results": [
                {
                    "name": result.job.name,
                    "device": result.job.device,
                    "threads": result.job.num_threads,
                    "warm_up_s": result.warm_up_s,
                    "turns": [asdict(turn) for turn in result.turns],
                    "failure": result.failure,
                }
                for result in self.results
            ],
        }


def flops_per_token(case: Case, arrays: Arrays) -> float:
    """Return the training FLOPs per token, for the examples' lengths and masks.

    All of the model's products are counted, for both sides; ours leaves those of the last layer
    out that nothing reads.
    """
    return train_flops_per_token(
        case.config, length=arrays.mean_seen, masked_rate=arrays.masked_rate
    )


def hardware(device: str, num_threads: int, peak_flops: float) -> str:
    """Describe the machine, and the peak that MFU counts from, in a line."""
    dtype = "bf16" if product_dtype(torch.device(device)) == torch.bfloat16 else "fp32"
    versions = (
        f"{peak_flops / _TERA:,.2f} TFLOPS in {dtype}; torch {torch.__version__}, "
        f"transformers {transformers.__version__}, Python {platform.python_version()}"
    )
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}; {versions}"
    return f"{processor_name()}, {num_threads} threads; {versions}"


def save(reports: Sequence[Report], machine: str, folder: Path) -> None:
    """Write `results.json` and `tables.md`."""
    content = {"hardware": machine, "cases": [report.to_dict() for report in reports]}
    (folder / "results.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    tables = "\n".join(report.markdown() for report in reports)
    (folder / "tables.md").write_text(f"{machine}\n\n{tables}", encoding="utf-8")
