"""Training on several processes: the world they form, and how they share a model's work.

`torchrun --nproc-per-node N -m training.pretrain ...` starts them. Each takes every N-th batch of a
step, and gradients are averaged. ALBERT's shared layer has its gradient only when the backward
pass is over, so that there is next to nothing to overlap; what is sent is one layer's gradient,
47 MB for base, however many layers apply it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NoReturn, cast

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from training.errors import TrainingError
from training.model.heads import AlbertForTasks

Parallelism = Literal["ddp", "fsdp"]
# Past it a process that waits for the others takes them to be dead; an evaluation is shorter.
_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """The processes that train together; by default this one alone."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that reports and writes."""
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums of these numbers over all processes."""
        if self.size == 1:
            return list(values)
        summed = torch.tensor(values, dtype=torch.float64, device=self.device)
        distributed.all_reduce(summed)
        return cast("list[float]", summed.tolist())


@contextmanager
def join_world(device: torch.device) -> Iterator[World]:
    """Inside `with`, the world that torchrun made, or else this process alone.

    An error that leaves it is told to torchrun as well, whose report on the job comes last. When
    another process has ended, so does this one, with a line on stderr and status 1.
    """
    if not distributed.is_torchelastic_launched():
        yield World(device=device)
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=_TIMEOUT)
    try:
        yield World(rank=distributed.get_rank(), size=distributed.get_world_size(), device=device)
    except TrainingError as error:
        _tell_torchrun(error)
        raise
    except RuntimeError as error:
        if _is_of_a_peer(error):
            _end()
        raise
    finally:
        distributed.destroy_process_group()


def _is_of_a_peer(error: RuntimeError) -> bool:
    """Whether it comes from what connects processes; gloo's has no type of its own."""
    return isinstance(error, distributed.DistError) or "/gloo/" in str(error)


def _end() -> NoReturn:
    """End this process here and now.

    Taken down amidst what it was to send, gloo at times waits for a thread that waits for the
    interpreter, for ever; NCCL would wait for the process that is gone.
    """
    print(
        "error: another process of the run has ended, or cannot be reached; "
        "the same command goes on from the last checkpoint",
        file=sys.stderr,
    )
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _tell_torchrun(error: TrainingError) -> None:
    """Have torchrun's report on the job say why this process failed."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        said = {"message": f"error: {error}", "timestamp": int(time.time())}
        Path(file).write_text(json.dumps(said))


def share(objective: nn.Module, model: AlbertForTasks, world: World, how: Parallelism) -> nn.Module:
    """The objective over `model` as all processes of the world train it together.

    `ddp` gives each process the whole model; `fsdp` shards weights, gradients and optimizer.
    """
    if how == "fsdp" and distributed.is_initialized():
        for block in (*model.albert.encoder.attentions, *model.albert.encoder.ffns):
            # A block is applied again soon: gathered once, it stays for the whole pass.
            fully_shard(block, reshard_after_forward=False)
        fully_shard(objective)
        return objective
    if world.size > 1:
        return DistributedDataParallel(objective)
    return objective


@contextmanager
def accumulating(shared: nn.Module, *, is_last: bool) -> Iterator[None]:
    """Inside `with`, gradients are sent to other processes after the last pass of a step only."""
    if isinstance(shared, FSDPModule):
        shared.set_requires_gradient_sync(is_last)
        yield
    elif isinstance(shared, DistributedDataParallel) and not is_last:
        with shared.no_sync():
            yield
    else:
        yield


def whole(value: Any) -> Any:
    """Tensors that may be sharded, in whatever dicts and lists, whole; all processes call it."""
    if isinstance(value, dict):
        return {key: whole(each) for key, each in value.items()}
    if isinstance(value, list):
        return [whole(each) for each in value]
    return value.full_tensor() if isinstance(value, DTensor) else value


def shard_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor, sharded where the parameter is; all processes call it with the same."""
    if not isinstance(parameter, DTensor):
        return tensor
    # The source rank is none: each process has the whole tensor and keeps its own shard.
    sharded: Tensor = distribute_tensor(
        tensor.to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        src_data_rank=None,
    )
    return sharded


def shard_states(optimizer: Optimizer) -> None:
    """Shard a state that was loaded whole as its parameters are."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                state[name] = shard_like(value, parameter)


def reshard(shared: nn.Module) -> None:
    """Spread weights over the processes again, which a forward pass without a backward does not."""
    for module in shared.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
