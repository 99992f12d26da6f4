"""CUDA: the reason why it cannot be used, the options of its sessions, and a worker's device."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
from itertools import count as naturals
from pathlib import Path
from typing import Final

import onnxruntime as ort
from filelock import FileLock, Timeout

from albert_serve.errors import EngineError
from albert_serve.settings import metrics_folder

PROVIDER: Final = "CUDAExecutionProvider"
_OLDEST_DRIVER: Final = 580  # the first driver that runs CUDA 13
_CUDA_MAJOR: Final = 13
NO_DRIVER: Final = "no NVIDIA driver is installed"
ADVICE: Final = (
    "CUDA 13 and cuDNN 9 come with make serve-gpu, or pip install 'albert-serve[gpu]'; "
    f"the NVIDIA driver must be {_OLDEST_DRIVER} or newer, "
    # onnxruntime-gpu 1.31 has kernels for these, and no PTX for others.
    "the compute capability 7.5, 8.0, 8.6, 8.9, 9.0, 12.0"
)
# The locks of `own_device`.
_PLACES: Final[list[FileLock]] = []


def no_cuda_reason() -> str | None:
    """Return why CUDA cannot be used, as far as it shows without a session; else None."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return NO_DRIVER
    if PROVIDER not in ort.get_available_providers():
        return "this onnxruntime is built without CUDA (onnxruntime-gpu has it)"
    if not _num_devices():
        return "the NVIDIA driver finds no device"
    version = ctypes.c_int(0)
    driver.cuDriverGetVersion(ctypes.byref(version))
    if version.value < 1000 * _CUDA_MAJOR:
        supported = f"{version.value // 1000}.{version.value % 1000 // 10}"
        return f"the NVIDIA driver supports CUDA {supported}, and CUDA {_CUDA_MAJOR} is needed"
    return _missing_library()


def cannot_be_used(reason: str) -> EngineError:
    """Return the error of CUDA that was asked for by name."""
    return EngineError(f"CUDA is asked for and cannot be used: {reason}. {ADVICE}")


def cuda_provider(memory_limit: int | None = None) -> dict[str, str]:
    """Return the options of the CUDA provider.

    Args:
        memory_limit: limit of the session's activations, in bytes, in addition to its weights.
    """
    options = {
        "device_id": str(own_device()),
        "arena_extend_strategy": "kSameAsRequested",
        "use_tf32": "0",
    }
    return options if memory_limit is None else {**options, "gpu_mem_limit": str(memory_limit)}


@functools.cache
def own_device() -> int:
    """Return the number of this process' device: the workers of a service take all in turn.

    A worker holds the first free place of the service's, so that one that replaces another takes
    its device.
    """
    count, folder = _num_devices(), metrics_folder()
    if count < 2 or folder is None:
        return 0
    for place in naturals():
        lock = FileLock(folder / f"cuda-place-{place}.lock", blocking=False)
        with contextlib.suppress(Timeout):
            lock.acquire()
            _PLACES.append(lock)  # until the process ends
            return place % count
    raise AssertionError


def _num_devices() -> int:
    """Return the number of devices that the driver shows; 0 without a driver."""
    count = ctypes.c_int(0)
    with contextlib.suppress(OSError):
        driver = ctypes.CDLL("libcuda.so.1")
        if not driver.cuInit(0):
            driver.cuDeviceGetCount(ctypes.byref(count))
    return count.value


def _missing_library() -> str | None:
    """Load CUDA's libraries as the runtime does; return the one that is missing."""
    with contextlib.redirect_stdout(io.StringIO()):  # it prints the names of missing libraries
        ort.preload_dlls(directory="")  # from NVIDIA's pip packages, if they are installed
    folder = Path(ort.__file__).parent / "capi"
    try:
        for name in ("shared", "cuda"):
            library = folder / f"libonnxruntime_providers_{name}.so"
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        return f"a library of CUDA is missing: {error}"
    return None
