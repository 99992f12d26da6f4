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
    sets = f"({', '.join(_instruction_sets())})"
    threads = f"{num_threads} threads of {usable_cpus()} CPUs"
    yield f"{processor_name()} {sets}, {threads}; {platform.platform()}"
    one_minute, five_minutes, _ = os.getloadavg()
    yield f"load before the start: {one_minute:.2f} over 1 minute, {five_minutes:.2f} over 5"
    found = [f"{name} {found}" for name in _PACKAGES if (found := installed_version(name))]
    yield ", ".join([f"Python {platform.python_version()}", *found])


def processor_name() -> str:
    """Of the processor."""
    return _cpuinfo().get("model name") or platform.processor() or platform.machine()


def _instruction_sets() -> list[str]:
    """Those that matter here; none where the system does not tell."""
    flags = set(_cpuinfo().get("flags", "").split())
    return [name for name in _INTERESTING if name in flags]


def _cpuinfo() -> dict[str, str]:
    """Of the first processor, on Linux."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n", 1)[0]
    except OSError:
        return {}
    fields = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, value in fields}


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
