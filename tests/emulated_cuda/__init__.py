"""Emulated CUDA libraries, over which ONNX Runtime's real CUDA provider loads without a GPU.

They show where nodes are placed, which kernels are launched, what is allocated and captured. They
compute nothing: numbers and times need a device.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import onnxruntime as ort

_SOURCES: Final = Path(__file__).parent
_ROOT: Final = _SOURCES.parents[1]
# Library -> source; None: an empty library.
LIBRARIES: Final = {
    "libcudart.so.13": "cudart.cpp",
    "libcublas.so.13": "cublas.c",
    "libcublasLt.so.13": "cublaslt.c",
    "libcuda.so.1": "driver.c",
    "libcudnn.so.9": "cudnn.c",
    "libcurand.so.10": None,
}
_VERSIONED: Final = ("libcudart.so.13", "libcublas.so.13", "libcublasLt.so.13", "libcudnn.so.9")
_TIMEOUT_S: Final = 300


def missing() -> str | None:
    """Return what the emulation lacks on this machine; None if it can be built and used."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return "the CUDA provider is for Linux on x86-64"
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        return "this onnxruntime is built without CUDA"
    return None


def build(folder: Path) -> None:
    """Compile the libraries into a folder."""
    for name, source in LIBRARIES.items():
        command = ["g++" if source == "cudart.cpp" else "gcc", "-shared", "-fPIC", "-O1", "-w"]
        if source is None:
            (folder / "empty.c").write_text("")
        command += [str(_SOURCES / source if source else folder / "empty.c")]
        command += ["-o", str(folder / name), f"-Wl,-soname,{name}"]
        if name in _VERSIONED:
            (folder / f"{name}.map").write_text(f"{name} {{ global: *; }};")
            command += [f"-Wl,--version-script={folder / name}.map"]
        if name.startswith("libcublas"):
            command += [f"-L{folder}", "-l:libcudart.so.13"]
        subprocess.run(command, check=True, timeout=_TIMEOUT_S)


@dataclass(frozen=True)
class Outcome:
    """A process over the emulation: the JSON that it printed last, and what it was heard to do."""

    result: Any
    errors: str
    log: list[str]


def run(
    folder: Path,
    code: str,
    *arguments: str,
    without: Collection[str] = (),
    variables: Mapping[str, str] | None = None,
) -> Outcome:
    """Run Python code in a process whose CUDA libraries are the emulated ones.

    Args:
        folder: where they were built.
        code: it prints JSON as its last line.
        arguments: `sys.argv[1:]` of the code.
        without: libraries that are left out.
        variables: of the environment, such as EMULATED_SM.
    """
    libraries = folder / "-".join(["with", *sorted(without)])
    libraries.mkdir(exist_ok=True)
    for name in LIBRARIES.keys() - set(without):
        shutil.copyfile(folder / name, libraries / name)
    log = folder / "log"
    environment = {
        **os.environ,
        "PYTHONPATH": str(_ROOT),
        "LD_LIBRARY_PATH": str(libraries),
        "EMULATED_LOG": str(log),
        **(variables or {}),
    }
    log.write_text("")
    process = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        cwd=_ROOT,
        timeout=_TIMEOUT_S,
    )
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout.splitlines()[-1])
    return Outcome(result, process.stderr, log.read_text(errors="replace").splitlines())
