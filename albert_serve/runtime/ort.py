"""ONNX Runtime: versions, session options, and sessions.

docs/decisions.md has the measurement behind each choice.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import onnxruntime as ort

from albert_serve.errors import BundleCorruptError, EngineError
from albert_serve.runtime.cuda import ADVICE, PROVIDER
from albert_serve.settings import RuntimeOptions

# On a CPU SkipLayerNormalization takes 6 times as long as the operators that it replaces.
_SLOWER_FUSIONS: Final = ["SkipLayerNormFusion"]
_FOLDING: Final = ["ConstantFolding", "FuseFp16InitializerToFp32NodeTransformer"]
_CPU_INFO: Final = Path("/proc/cpuinfo")

# This disables ONNX Runtime's own log. Its warnings show no faults (each CUDA session has one), and
# its errors are also raised.
ort.set_default_logger_severity(4)


def encoder_options(options: RuntimeOptions) -> ort.SessionOptions:
    """Return the session options of an encoder on a CPU."""
    session_options = _common_options(options.threads)
    _set(session_options, "session.intra_op.allow_spinning", str(int(options.spinning)))
    return session_options


def head_options() -> ort.SessionOptions:
    """Return the session options of a head on a CPU.

    One thread is enough for a head's few rows. Without prepacked weights, all heads and processes
    read the same pages of the bundle.
    """
    session_options = _common_options(1)
    _set(session_options, "session.disable_prepacking", "1")
    # An arena would keep the memory of the largest logits.
    session_options.enable_cpu_mem_arena = False
    return session_options


def cuda_options() -> ort.SessionOptions:
    """Return the session options of any graph on a CUDA device."""
    session_options = _common_options(1)
    _set(session_options, "session.use_device_allocator_for_initializers", "1")
    # Otherwise each run would dequantise int8 weights again, because this step is not folded.
    _set(session_options, "session.disable_quant_qdq", "1")
    return session_options


def open_session(
    graph: Path,
    options: ort.SessionOptions,
    *,
    cuda: Mapping[str, str] | None = None,
    folds: bool = True,
) -> ort.InferenceSession:
    """Open the session of a graph.

    Args:
        graph: file of the graph.
        options: session options.
        cuda: options of the CUDA provider, or None to run on the CPU.
        folds: whether constants, such as fp32 casts of fp16 weights, are computed once and stored.
            Otherwise, each run computes them.
    """
    providers: list[Any] = [("CPUExecutionProvider", {"arena_extend_strategy": "kSameAsRequested"})]
    if cuda is not None:
        providers.insert(0, (PROVIDER, dict(cuda)))
    disabled_optimizers = _SLOWER_FUSIONS if folds else [*_SLOWER_FUSIONS, *_FOLDING]
    try:
        session = ort.InferenceSession(
            str(graph),
            options,
            providers=providers,
            disabled_optimizers=disabled_optimizers,
            enable_fallback=0,  # a fallback would silently open a session on the CPU
        )
    except Exception as error:  # the runtime's exceptions have no other common base
        raise BundleCorruptError(
            f"{graph} cannot be loaded by onnxruntime {ort.__version__}: {error}. Export the "
            "bundle again, or install the version that its manifest lists under provenance."
        ) from error
    if cuda is not None and session.get_providers()[0] != PROVIDER:
        raise EngineError(f"onnxruntime {ort.__version__} opened a session without CUDA. {ADVICE}")
    return session


def processor_name() -> str:
    """Return the name of the processor's model."""
    return _cpu_info().get("model name") or platform.processor() or platform.machine()


def cpu_name() -> str:
    """Return the processor's model and the instruction sets that kernels use."""
    return " ".join([processor_name(), *sorted(cpu_flags() & _KERNEL_FLAGS)])


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Return the names of the processor's instruction sets, which are known only on Linux."""
    return frozenset(_cpu_info().get("flags", "").split())


def return_free_memory() -> None:
    """Return free memory to the system, which glibc would keep."""
    with contextlib.suppress(OSError, AttributeError):  # not every system has glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)


# These instruction sets determine the runtime's kernels, and so the layout of packed weights.
_KERNEL_FLAGS: Final = frozenset(
    {"avx", "avx2", "fma", "avx512f", "avx512bw", "avx512_bf16", "avx512_vnni", "avx_vnni"}
    | {"avx_vnni_int8", "amx_tile", "amx_int8", "amx_bf16"}
)


def _common_options(num_threads: int) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.log_severity_level = 3
    # A memory pattern is valid for one shape, but shapes change with every batch. The arena stays
    # enabled, because page faults would take up to a third of a call.
    options.enable_mem_pattern = False
    return options


def _set(options: ort.SessionOptions, key: str, value: str) -> None:
    options.add_session_config_entry(key, value)


@functools.cache
def _cpu_info() -> Mapping[str, str]:
    """Return the last processor's entries of /proc/cpuinfo."""
    try:
        lines = _CPU_INFO.read_text().splitlines()
    except OSError:
        return {}
    entries = (line.partition(":") for line in lines)
    return {key.strip(): value.strip() for key, _, value in entries}
