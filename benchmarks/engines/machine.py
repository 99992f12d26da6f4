"""What a measurement runs on: hardware, versions, and what else the machine does."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

_PACKAGES: Final = ("torch", "transformers", "onnxruntime", "onnxruntime-gpu", "openvino", "nncf")
_INTERESTING: Final = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8")


def describe_machine(num_threads: int) -> Iterator[str]:
    """Hardware, load and versions, a line each."""
    yield f"{processor()}, {num_threads} threads of {usable_cpus()} CPUs; {platform.platform()}"
    one_minute, five_minutes, _ = os.getloadavg()
    yield f"load before the start: {one_minute:.2f} over 1 minute, {five_minutes:.2f} over 5"
    found = [f"{name} {found}" for name in _PACKAGES if (found := installed_version(name))]
    yield ", ".join([f"Python {platform.python_version()}", *found])


def processor() -> str:
    """Its name and, on Linux, the instruction sets that matter here."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n", 1)[0]
    except OSError:
        return platform.processor() or platform.machine()
    fields = dict(line.split(":", 1) for line in first.splitlines() if ":" in line)
    values = {name.strip(): value.strip() for name, value in fields.items()}
    flags = set(values.get("flags", "").split())
    sets = [name for name in _INTERESTING if name in flags]
    return " ".join([values.get("model name", platform.machine()), f"({', '.join(sets)})"])


def usable_cpus() -> int:
    """CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def installed_version(package: str) -> str | None:
    """Of a package; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
