"""A contestant's side of the measurement: its process works on request and sleeps otherwise."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Final, Protocol, runtime_checkable

from albert_serve.doctor.memory import read_memory as memory_of_process
from benchmarks.engines.inputs import Batch, Floats, Inputs, LoadResult, probabilities
from benchmarks.engines.jobs import (
    MEMORY,
    QUESTIONS,
    TEXTS,
    Job,
    Memory,
    Opened,
    Request,
    Shape,
    Turn,
)
from benchmarks.harness.channel import Channel

_BYTES_A_KIB: Final = 1024
_LEAST_CALLS: Final = 2


def read_memory() -> Memory:
    """Return this process' memory; without /proc, its peak."""
    memory = memory_of_process()
    if memory is None:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _BYTES_A_KIB
        return Memory(rss_bytes=most, pss_bytes=most, anonymous_bytes=most)
    return Memory(
        rss_bytes=memory.private_bytes + memory.shared_bytes,
        pss_bytes=memory.pss_bytes,
        anonymous_bytes=memory.anonymous_bytes,
    )


class Player(Protocol):
    """A model that is ready."""

    def process(self, items: Sequence[Any], batch_size: int) -> LoadResult:
        """Answer all items of a stream, from their text."""
        ...


@runtime_checkable
class ShapePlayer(Player, Protocol):
    """A model that can also be called with one batch of ids."""

    def logits(self, batch: Batch) -> Floats:
        """Logits (B, K) of the batch."""
        ...


class Referee:
    """Times a player's work."""

    def __init__(self, player: Player, inputs: Inputs) -> None:
        self._player, self._inputs = player, inputs
        self._seen: set[str] = set()

    def answer(self, request: Request) -> dict[str, Any]:
        """Return the answer to a request, as a message."""
        if request.case == MEMORY:
            return asdict(read_memory())
        is_stream = request.case in (TEXTS, QUESTIONS)
        return asdict(self._stream(request) if is_stream else self._shape(request))

    def _stream(self, request: Request) -> Turn:
        """One pass over the items; before the first, two of them are not timed."""
        items = self._inputs.part(request.case, request.part)
        if request.case not in self._seen:
            self._seen.add(request.case)
            for few in (items[:2], items[:1]):
                self._player.process(few, request.batch_size)
        began, began_cpu = time.perf_counter(), time.process_time()
        result = self._player.process(items, request.batch_size)
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - began_cpu
        tokens = result.count()
        return Turn(
            seconds=seconds,
            cpu_seconds=cpu_seconds,
            num_items=len(items),
            num_tokens=tokens.num_real,
            num_computed=tokens.num_computed,
            outputs=result.outputs,
        )

    def _shape(self, request: Request) -> Turn:
        """The median of some calls; before the first of a shape, one is not timed."""
        shape, player = Shape.parse(request.case), self._player
        assert isinstance(player, ShapePlayer)
        batch = self._inputs.batch(shape)
        if request.case not in self._seen:
            self._seen.add(request.case)
            player.logits(batch)
        calls: list[float] = []
        began_cpu = time.process_time()
        while len(calls) < _LEAST_CALLS or sum(calls) < request.seconds:
            began = time.perf_counter()
            logits = player.logits(batch)
            calls.append(time.perf_counter() - began)
        num_tokens = shape.num_rows * shape.length
        return Turn(
            seconds=statistics.median(calls),
            cpu_seconds=(time.process_time() - began_cpu) / len(calls),
            num_items=shape.num_rows,
            num_tokens=num_tokens,
            num_computed=num_tokens,
            outputs=probabilities(logits),
        )


def serve(open_player: Callable[[Job], Player]) -> None:
    """Be the process of the job that the first argument is."""
    channel = Channel()
    job = Job.from_json(sys.argv[1])
    import_bytes = read_memory().rss_bytes
    began = time.perf_counter()
    player = open_player(job)
    opened = Opened(load_s=time.perf_counter() - began, import_bytes=import_bytes)
    channel.send(asdict(opened))
    referee = Referee(player, Inputs.read(job.inputs))
    while (message := channel.receive()) is not None:
        channel.send(referee.answer(Request(**message)))
