"""Distributed training: the process group, and the replication of a model by DDP.

`torchrun --nproc-per-node N --no-python albert-serve pretrain ...` starts the processes. Each takes
every N-th micro-batch of a step, and gradients are averaged. The gradient of ALBERT's shared layer
is complete only at the end of the backward pass, so almost no communication can overlap with it.
Only this layer's gradient is sent, 47 MB for base, however many layers use it. Only the main
process writes and prints.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import torch
from huggingface_hub.utils.tqdm import disable_progress_bars
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from albert_serve.progress import no_progress
from training.errors import REPORTED, TrainingError

_ValueT = TypeVar("_ValueT")
# Timeout of collectives in training. It must exceed an evaluation, for which other processes wait.
_TIMEOUT = timedelta(minutes=30)
# Timeout while processes wait (over gloo, even with GPUs) for the main one to tokenise a corpus.
_SETUP_TIMEOUT = timedelta(days=7)
# References that keep process groups until this process ends. When a run fails, DDP drops its own
# reference. Freeing the group would then block the interpreter while it waits for gloo's thread,
# which may itself need the interpreter to free the tensor of the last collective.
_process_groups: list[object] = []


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """The rank of this process in the process group. By default, it is the only process.

    Attributes:
        setup: process group with a long timeout, for `wait_for_all` and `fail_together`.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    setup: distributed.ProcessGroup | None = None

    @property
    def is_main(self) -> bool:
        """Whether this process reports and writes."""
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sum of each number over all processes."""
        if self.size == 1:
            return list(values)
        summed = torch.tensor(values, dtype=torch.float64, device=self.device)
        distributed.all_reduce(summed)
        return cast("list[float]", summed.tolist())

    def sum_in_setup(self, values: Sequence[float]) -> list[float]:
        """Return the same sums as `sum`, with the long timeout of the setup."""
        if self.size == 1:
            return list(values)
        summed = torch.tensor(values, dtype=torch.float64)
        distributed.all_reduce(summed, group=self.setup)
        return cast("list[float]", summed.tolist())

    def gather(self, value: _ValueT) -> list[_ValueT]:
        """Return the value of each process, in the order of their ranks."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value)
        return values

    def wait_for_all(self) -> None:
        """Wait for all processes within `fail_together`. Exit with status 1 if one has failed."""
        num_failed, _ = self.sum_in_setup([0.0, 0.0])
        if num_failed:
            raise SystemExit(1)


@contextmanager
def join_world(device: torch.device) -> Iterator[World]:
    """Join torchrun's process group, if any, for a `with` block.

    A `TrainingError` is also reported to torchrun, which prints it at the end of the job. If
    another process has ended, this process prints a line on stderr and exits with status 1. Only
    the main process prints on stdout and shows progress.
    """
    if not distributed.is_torchelastic_launched():
        yield World(device=device)
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=_TIMEOUT)
    _process_groups.append(distributed.group.WORLD)
    setup = distributed.new_group(backend="gloo", timeout=_SETUP_TIMEOUT)
    _process_groups.append(setup)
    world = World(
        rank=distributed.get_rank(), size=distributed.get_world_size(), device=device, setup=setup
    )
    try:
        with ExitStack() as stack:
            if not world.is_main:
                null_file = Path(os.devnull).open("w", encoding="utf-8", errors="replace")  # noqa: SIM115
                stack.enter_context(redirect_stdout(stack.enter_context(null_file)))
                stack.enter_context(no_progress())
                disable_progress_bars()  # of downloads
            yield world
    except TrainingError as error:
        _report_to_torchrun(error)
        raise
    except RuntimeError as error:
        if _is_communication_error(error):
            _exit()
        raise
    finally:
        distributed.destroy_process_group()


@contextmanager
def fail_together(world: World) -> Iterator[None]:
    """Wait for all processes at the end of `with`, and fail in all if one has failed.

    If the main process has failed, only it reports its error, because all may have failed for the
    same reason. Otherwise, each failed process reports its own error. Processes without a report
    exit with status 1. Within the block, processes may only wait with `World.wait_for_all`.
    """
    error: Exception | None = None
    try:
        yield
    except REPORTED as caught:
        error = caught
    has_failed = error is not None
    num_failed, main_has_failed = world.sum_in_setup([has_failed, has_failed and world.is_main])
    if error is not None and (world.is_main or not main_has_failed):
        raise error
    if num_failed:
        raise SystemExit(1)


@contextmanager
def main_first(world: World) -> Iterator[None]:
    """Run a `with` block, within `fail_together`, in the main process before all others.

    The other processes can then read files that the main process has written.
    """
    if not world.is_main:
        world.wait_for_all()
    yield
    if world.is_main:
        world.wait_for_all()


def _is_communication_error(error: RuntimeError) -> bool:
    """Return whether a collective raised the error. gloo's errors are recognised by their text."""
    return isinstance(error, distributed.DistError) or "/gloo/" in str(error)


def _exit() -> NoReturn:
    """Exit immediately, without destroying the process group.

    Destroying it during a collective may deadlock gloo, whose thread waits for the interpreter.
    NCCL would wait for the process that has ended.
    """
    print(
        "error: Another process of the run has ended or cannot be reached. "
        "Repeat the command to resume from the last checkpoint.",
        file=sys.stderr,
    )
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _report_to_torchrun(error: TrainingError) -> None:
    """Write the error file from which torchrun reports why this process failed."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        report = {"message": f"error: {error}", "timestamp": int(time.time())}
        Path(file).write_text(json.dumps(report))


def replicate(objective: nn.Module, world: World, *, trains_all: bool = True) -> nn.Module:
    """Wrap an objective for training by all processes.

    Args:
        trains_all: whether every step trains all parameters.
    """
    if world.size == 1:
        return objective
    return DistributedDataParallel(objective, find_unused_parameters=not trains_all)


def unwrap(replicated: nn.Module) -> nn.Module:
    """Return this process' own objective, which it can use alone."""
    if not isinstance(replicated, DistributedDataParallel):
        return replicated
    objective: nn.Module = replicated.module
    return objective


@contextmanager
def accumulating(replicated: nn.Module, *, is_last: bool) -> Iterator[None]:
    """Synchronise gradients within `with` only for the last micro-batch of a step."""
    if isinstance(replicated, DistributedDataParallel) and not is_last:
        with replicated.no_sync():
            yield
    else:
        yield
