"""The properties of the machine that decide a model's device and speed."""

from __future__ import annotations

import contextlib
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import onnxruntime as ort

from albert_serve.runtime.cuda import no_cuda_reason
from albert_serve.runtime.ort import cpu_flags, cpu_name
from albert_serve.settings import num_usable_cpus

# Instruction sets for int8 dot products, and for bf16, by their names in Linux.
_INT8_FLAGS: Final = ("avx512_vnni", "avx_vnni", "avx_vnni_int8", "amx_int8")
_BF16_FLAGS: Final = ("avx512_bf16", "amx_bf16")


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The properties of this machine.

    Attributes:
        system: operating system and architecture.
        processor: the model's name.
        num_cpus: all processors.
        num_usable_cpus: those that this process may use.
        cpu_quota: processors' worth of time that a container or service is held to; None where
            there is no such limit, or none can be read.
        instructions_are_known: whether the next two could be read.
        int8_instructions: instruction sets that the runtime's int8 kernels can use.
        bf16_instructions: instruction sets for bf16.
        onnxruntime: its version.
        providers: the runtime's execution providers.
        no_cuda: the reason why there is no CUDA device; None if there is one.
    """

    system: str
    processor: str
    num_cpus: int
    num_usable_cpus: int
    cpu_quota: float | None
    instructions_are_known: bool
    int8_instructions: list[str]
    bf16_instructions: list[str]
    onnxruntime: str
    providers: list[str]
    no_cuda: str | None


def read_machine() -> Machine:
    """Read the properties from the system and the runtime."""
    flags = cpu_flags()
    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        processor=processor_name(),
        num_cpus=os.cpu_count() or 1,
        num_usable_cpus=num_usable_cpus(),
        cpu_quota=cpu_quota(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")),
        instructions_are_known=bool(flags),
        int8_instructions=[flag for flag in _INT8_FLAGS if flag in flags],
        bf16_instructions=[flag for flag in _BF16_FLAGS if flag in flags],
        onnxruntime=ort.__version__,
        providers=list(ort.get_available_providers()),
        no_cuda=no_cuda_reason(),
    )


def cpu_quota(root: Path, membership: Path) -> float | None:
    """Return the CPU quota of the process' control group and its parents, in processors.

    Args:
        root: the mount point of control groups.
        membership: the file that names the process' own; in a container it may name one that is
            not mounted, and the root is the container's.
    """
    quotas: list[float] = []
    for folder in _groups(root, membership):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            quotas.append(_read_quota(folder))
    return min((quota for quota in quotas if quota > 0), default=None)


def _groups(root: Path, membership: Path) -> list[Path]:
    """Return the folders of the process' CPU control groups, cgroup v1 or v2."""
    try:
        entries = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        return []
    folders: list[Path] = []
    for _, controllers, name in entries:
        if controllers == "" or "cpu" in controllers.split(","):
            top = root / controllers
            own = top / name.lstrip("/")
            folders += [own, *(parent for parent in own.parents if parent.is_relative_to(top))]
    return folders


def _read_quota(folder: Path) -> float:
    """Return the quota; not positive without a limit, a ValueError for "max"."""
    if (folder / "cpu.max").is_file():
        quota_us, period_us = (folder / "cpu.max").read_text().split()
    else:
        quota_us = (folder / "cpu.cfs_quota_us").read_text()
        period_us = (folder / "cpu.cfs_period_us").read_text()
    return int(quota_us) / int(period_us)


def processor_name() -> str:
    """Return the processor's name without the instruction sets of `cpu_name`."""
    if not cpu_flags():
        return platform.processor() or platform.machine()
    words = cpu_name().split()
    while len(words) > 1 and words[-1] in cpu_flags():
        words.pop()
    return " ".join(words)
