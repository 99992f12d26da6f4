"""CUDA: reasons why it is not available, options of its sessions, and a worker's device."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
from itertools import count
from pathlib import Path
from typing import Final

import onnxruntime as ort
from filelock import FileLock, Timeout

from albert_serve.errors import EngineError
from albert_serve.settings import metrics_folder

PROVIDER: Final = "CUDAExecutionProvider"
_OLDEST_DRIVER: Final = 580  # the first driver that runs CUDA 13
_CUDA_MAJOR: Final = 13
NO_DRIVER: Final = "No NVIDIA driver is installed."
ADVICE: Final = (
    "Install CUDA 13 and cuDNN 9 with `make serve-gpu` or `pip install 'albert-serve[gpu]'`. "
    f"The NVIDIA driver must be {_OLDEST_DRIVER} or newer. "
    # onnxruntime-gpu 1.31 has kernels for these capabilities, and no PTX for others.
    "The compute capability must be 7.5, 8.0, 8.6, 8.9, 9.0 or 12.0."
)
# `own_device` keeps these locks until the process ends.
_LOCKS: Final[list[FileLock]] = []


def no_cuda_reason() -> str | None:
    """Return why CUDA is not available, or None if no reason is found without a session."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return NO_DRIVER
    if PROVIDER not in ort.get_available_providers():
        return "This onnxruntime was built without CUDA. Install onnxruntime-gpu instead."
    if not _num_devices():
        return "The NVIDIA driver finds no device."
    version = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    if version.value < 1000 * _CUDA_MAJOR:
        supported = f"{version.value // 1000}.{version.value % 1000 // 10}"
        return f"The NVIDIA driver supports CUDA {supported}, but CUDA {_CUDA_MAJOR} is required."
    return _missing_library()


def cuda_error(reason: str) -> EngineError:
    """Return the error for a setting that requires CUDA."""
    return EngineError(f"CUDA cannot be used. {reason} {ADVICE}")


def cuda_provider(memory_limit: int | None = None) -> dict[str, str]:
    """Return the options of the CUDA provider.

    Args:
        memory_limit: maximum size of the session's activations in bytes, without its weights.
    """
    options = {
        "device_id": str(own_device()),
        "arena_extend_strategy": "kSameAsRequested",
        "use_tf32": "0",
    }
    return options if memory_limit is None else {**options, "gpu_mem_limit": str(memory_limit)}


@functools.cache
def own_device() -> int:
    """Return the number of this process's device. A service's workers take devices in turn.

    A worker takes the first free position of the service, so a replacement gets the same device.
    """
    num_devices, folder = _num_devices(), metrics_folder()
    if num_devices < 2 or folder is None:
        return 0
    for position in count():
        lock = FileLock(folder / f"cuda-position-{position}.lock", blocking=False)
        with contextlib.suppress(Timeout):
            lock.acquire()
            _LOCKS.append(lock)
            return position % num_devices
    raise AssertionError


def _num_devices() -> int:
    """Return the number of devices that the driver finds, or 0 without a driver."""
    num_devices = ctypes.c_int()
    with contextlib.suppress(OSError):
        driver = ctypes.CDLL("libcuda.so.1")
        if not driver.cuInit(0):
            driver.cuDeviceGetCount(ctypes.byref(num_devices))
    return num_devices.value


def _missing_library() -> str | None:
    """Load CUDA's libraries as the runtime does, and return a message if one is missing."""
    with contextlib.redirect_stdout(io.StringIO()):  # `preload_dlls` prints missing libraries
        ort.preload_dlls(directory="")  # from NVIDIA's pip packages, if they are installed
    folder = Path(ort.__file__).parent / "capi"
    try:
        for name in ("shared", "cuda"):
            library = folder / f"libonnxruntime_providers_{name}.so"
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        return f"A library of CUDA is missing: {error}."
    return None
