"""A child's side of the measurement: it trains when it is its turn, and waits otherwise.

The parent sends the seconds of each turn; the answer is what was done in it.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import asdict

import torch
from torch._dynamo.utils import counters

from benchmarks.harness.channel import Channel
from benchmarks.pretraining.jobs import Turn
from training.loop.step import Run
from training.system.memory import keep_freed_memory

_NUM_WARM_UP_STEPS = 3
# Between warm-up and decay, where the rate is the full one.
_DONE = 0.5
_BYTES_A_KIB = 1024


class Stopwatch:
    """Times turns of whole steps; to be called after each step.

    A turn in which something was compiled is begun again, so that neither side pays for a shape
    that it meets for the first time.

    Args:
        count_tokens: real tokens trained on so far; called at the ends of turns alone, because
            it may wait for the device.
    """

    def __init__(
        self, channel: Channel, device: torch.device, count_tokens: Callable[[], int]
    ) -> None:
        self._channel, self._device, self._count_tokens = channel, device, count_tokens
        self._created = time.perf_counter()
        self._num_steps = 0
        self._turn_s: float | None = None
        self._num_graphs = 0

    def step_is_done(self) -> bool:
        """Returns whether there is another step to be made."""
        self._num_steps += 1
        if self._turn_s is None:
            if self._num_steps < _NUM_WARM_UP_STEPS:
                return True
            self._synchronize()
            self._channel.send({"warm_up_s": time.perf_counter() - self._created})
            return self._begin_next()
        if _num_graphs() != self._num_graphs:
            self._begin()
        elif time.perf_counter() - self._began >= self._turn_s:
            self._channel.send(asdict(self._measure()))
            return self._begin_next()
        return True

    def _begin_next(self) -> bool:
        message = self._channel.receive()
        self._turn_s = None if message is None else message["seconds"]
        self._begin()
        return self._turn_s is not None

    def _begin(self) -> None:
        self._synchronize()
        self._num_graphs = _num_graphs()
        self._first_step, self._first_token = self._num_steps, self._count_tokens()
        self._began_cpu, self._began = time.process_time(), time.perf_counter()

    def _measure(self) -> Turn:
        self._synchronize()
        return Turn(
            seconds=time.perf_counter() - self._began,
            cpu_seconds=time.process_time() - self._began_cpu,
            num_steps=self._num_steps - self._first_step,
            num_tokens=self._count_tokens() - self._first_token,
            peak_bytes=self._peak_bytes(),
        )

    def _peak_bytes(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _BYTES_A_KIB

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def train_in_turns(run: Run, channel: Channel) -> None:
    """Make steps of this package's training until there is no further turn."""
    run.objective.train()
    device = run.world.device
    if device.type == "cpu":
        keep_freed_memory()
    watch = Stopwatch(channel, device, lambda: run.num_tokens)
    while True:
        run.step(_DONE)
        if not watch.step_is_done():
            return


def _num_graphs() -> int:
    """Graphs that torch.compile has made so far in this process."""
    return int(counters["stats"]["unique_graphs"])
