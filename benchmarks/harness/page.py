"""Tables in Markdown, and the machine that they are of."""

from __future__ import annotations

import json
import os
import platform
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
_INTERESTING: Final = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8")


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table whose first column is aligned to the left, the others to the right."""
    rule = ["---", *["---:"] * (len(headings) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [headings, rule, *rows])


def bullets(lines: Iterable[str]) -> str:
    """Return a list."""
    return "\n".join(f"- {line}" for line in lines)


def write_results(folder: Path, report: DataclassInstance, tables: str) -> None:
    """Write `results.json`, all fields of a report, and `tables.md` into a folder."""
    content = json.dumps(asdict(report), indent=1, default=str)
    (folder / "results.json").write_text(content, encoding="utf-8")
    (folder / "tables.md").write_text(tables, encoding="utf-8")


def describe_machine(num_threads: int) -> Iterator[str]:
    """Yield hardware, load and versions, a line each."""
    sets = f"({', '.join(name for name in _INTERESTING if name in cpu_flags())})"
    threads = f"{num_threads} threads of {num_usable_cpus()} CPUs"
    yield f"{processor_name()} {sets}, {threads}; {platform.platform()}"
    one_minute, five_minutes, _ = os.getloadavg()
    yield f"load before the start: {one_minute:.2f} over 1 minute, {five_minutes:.2f} over 5"
    yield ", ".join([f"Python {platform.python_version()}", *_versions()])


def _versions() -> Iterator[str]:
    for name in _PACKAGES:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
