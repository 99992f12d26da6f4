"""Description of the machine: hardware, versions, and its load."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from albert_serve.runtime.ort import cpu_flags, processor_name
from albert_serve.settings import num_usable_cpus

_PACKAGES: Final = ("torch", "transformers", "onnxruntime", "onnxruntime-gpu", "openvino", "nncf")
_INTERESTING: Final = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8")


def describe_machine(num_threads: int) -> Iterator[str]:
    """Hardware, load and versions, a line each."""
    sets = f"({', '.join(name for name in _INTERESTING if name in cpu_flags())})"
    threads = f"{num_threads} threads of {num_usable_cpus()} CPUs"
    yield f"{processor_name()} {sets}, {threads}; {platform.platform()}"
    one_minute, five_minutes, _ = os.getloadavg()
    yield f"load before the start: {one_minute:.2f} over 1 minute, {five_minutes:.2f} over 5"
    installed = [
        f"{name} {installed}" for name in _PACKAGES if (installed := installed_version(name))
    ]
    yield ", ".join([f"Python {platform.python_version()}", *installed])


def installed_version(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
