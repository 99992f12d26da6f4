"""Markdown tables, and a description of the machine."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Final

from albert_serve.runtime.ort import cpu_flags, processor_name
from albert_serve.settings import num_usable_cpus

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_PACKAGES: Final = (
    *("torch", "transformers", "onnxruntime", "onnxruntime-gpu", "openvino", "nncf", "bentoml"),
)
_REPORTED_FLAGS: Final = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8")


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table with the first column aligned left and the others right."""
    rule = ["---", *["---:"] * (len(headings) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [headings, rule, *rows])


def median_of(values: Sequence[float], digits: int = 2) -> str:
    """Return the median of the rounds, and their smallest and largest value in brackets."""
    median, low, high = (
        f"{value:,.{digits}f}" for value in (statistics.median(values), min(values), max(values))
    )
    return f"{median} ({low}–{high})" if len(values) > 1 else median


def ratios(rates: Iterable[float], baseline: Iterable[float]) -> list[float]:
    """Return how many times the baseline's rates are reached, by round.

    Other load on the machine varies less within a round than between rounds.
    """
    return [rate / base for rate, base in zip(rates, baseline, strict=True)]


def bullets(lines: Iterable[str]) -> str:
    """Return a Markdown list."""
    return "\n".join(f"- {line}" for line in lines)


def write_results(folder: Path, report: DataclassInstance, tables: str) -> None:
    """Write a report's fields to `results.json` and its tables to `tables.md` in a folder."""
    content = json.dumps(asdict(report), indent=1, default=str)
    (folder / "results.json").write_text(content, encoding="utf-8")
    (folder / "tables.md").write_text(tables, encoding="utf-8")


def describe_machine(num_threads: int) -> Iterator[str]:
    """Yield lines about hardware, load, versions and the commit."""
    flags = f"({', '.join(name for name in _REPORTED_FLAGS if name in cpu_flags())})"
    threads = f"{num_threads} threads of {num_usable_cpus()} CPUs"
    yield f"{processor_name()} {flags}, {threads}; {platform.platform()}"
    one_minute, five_minutes, _ = os.getloadavg()
    yield f"load before the start: {one_minute:.2f} over 1 minute, {five_minutes:.2f} over 5"
    yield ", ".join([f"Python {platform.python_version()}", *_versions()])
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"],  # noqa: S607
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    yield f"commit {described.stdout.strip() or 'unknown'}"


def _versions() -> Iterator[str]:
    for name in _PACKAGES:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
