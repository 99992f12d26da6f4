"""The memory of fresh processes that serve a bundle, all alive at once, and the time to open it."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import psutil

from albert_serve.bundle.manifest import WEIGHTS_FILE, Bundle
from albert_serve.errors import AlbertServeError, EngineError
from albert_serve.runtime.engine import Engine
from albert_serve.runtime.prepacking import PACKED_FILE
from albert_serve.settings import RuntimeOptions

# Processes that take longer are killed, so that a measurement never hangs.
_TIMEOUT_S: Final = 300.0
_STATUS: Final = Path("/proc/self/status")


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Resident memory of a process, or the sum of several, in bytes.

    Attributes:
        pss_bytes: its share: a page that n processes map counts one nth.
        private_bytes: pages that no other process maps.
        shared_bytes: pages that others map too, in full.
        anonymous_bytes: pages of no file, which no other process can share.
        peak_bytes: the most that was resident at once, in full.
    """

    pss_bytes: int
    private_bytes: int
    shared_bytes: int
    anonymous_bytes: int
    peak_bytes: int


def read_memory() -> Memory:
    """Return the memory of this process.

    Raises:
        EngineError: the system does not tell.
    """
    full = psutil.Process().memory_full_info()
    if not hasattr(full, "pss"):
        raise EngineError("this system does not tell the memory of a process; only Linux does")
    return Memory(
        pss_bytes=full.pss,
        private_bytes=full.uss,
        shared_bytes=full.rss - full.uss,
        anonymous_bytes=full.rss - full.shared,
        peak_bytes=_peak_bytes(),
    )


def _peak_bytes() -> int:
    # The ru_maxrss of getrusage would also count the parent's memory at the start of this process.
    [line] = [line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:")]
    return 1024 * int(line.split()[1])


def _mapped_pss_bytes(names: Collection[str]) -> int:
    """Return this process' PSS of mapped files of these names."""
    maps = psutil.Process().memory_maps()
    return sum(entry.pss for entry in maps if Path(entry.path).name in names)


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """The memory of processes that serve one bundle, all alive at once.

    Attributes:
        num_processes: the number of processes.
        before: all together, with the libraries imported and no bundle opened.
        after: all together, after each has run every task.
        bundle_pss_bytes: what the bundle added to the PSS: weights, sessions and activations.
        bundle_over_weights: the same over the size of the weight file.
        weights_pss_bytes: of that the weights: pages of the weight file and of packed weights on
            disk, and the private memory that the sessions took.
        weights_over_file: the same over the size of the weight file.
        sessions_s: the seconds in which the slowest made its sessions; all do so at the same time.
    """

    num_processes: int
    before: Memory
    after: Memory
    bundle_pss_bytes: int
    bundle_over_weights: float
    weights_pss_bytes: int
    weights_over_file: float
    sessions_s: float


def measure_footprint(bundle: Bundle, options: RuntimeOptions, num_processes: int) -> Footprint:
    """Start processes, have each open the bundle and run all tasks, and add up their memory.

    Raises:
        EngineError: a process failed, was killed or took too long, or the system does not tell
            the memory of processes.
    """
    with contextlib.ExitStack() as stack:
        children = [
            stack.enter_context(_started(bundle.folder, options)) for _ in range(num_processes)
        ]
        before = _total(_ask(children))
        opened = _ask(children)
        after = _total(_ask(children))
        mapped_bytes = sum(_ask(children))
    added_bytes = after.pss_bytes - before.pss_bytes
    weights_bytes = mapped_bytes + sum(packed_bytes for _, packed_bytes in opened)
    file_bytes = bundle.weights_file.stat().st_size
    return Footprint(
        num_processes=num_processes,
        before=before,
        after=after,
        bundle_pss_bytes=added_bytes,
        bundle_over_weights=added_bytes / file_bytes,
        weights_pss_bytes=weights_bytes,
        weights_over_file=weights_bytes / file_bytes,
        sessions_s=max(seconds for seconds, _ in opened),
    )


@contextlib.contextmanager
def _started(folder: Path, options: RuntimeOptions) -> Iterator[Connection]:
    """Run a process that serves a bundle; it ends with the context."""
    context = multiprocessing.get_context("spawn")
    parent, child = context.Pipe()
    process = context.Process(target=_serve, args=(child, folder, options), daemon=True)
    process.start()
    child.close()  # so that the end of the process is the end of the pipe
    try:
        yield parent
    finally:
        process.kill()
        process.join()


def _ask(children: Sequence[Connection]) -> list[Any]:
    """Tell all children to take their next step at the same time; return their results."""
    for child in children:
        with contextlib.suppress(BrokenPipeError):  # it is dead, as is told below
            child.send(None)
    return [_receive(child) for child in children]


def _receive(child: Connection) -> Any:
    if not child.poll(_TIMEOUT_S):
        raise EngineError(
            f"a process that opened the bundle took longer than {_TIMEOUT_S:.0f} s; try fewer "
            "workers"
        )
    try:
        answer = child.recv()
    except (EOFError, ConnectionResetError) as error:
        raise EngineError(
            "a process that opened the bundle was ended; there may be too little memory for it"
        ) from error
    if isinstance(answer, AlbertServeError):
        raise EngineError(str(answer)) from answer
    return answer


def _total(memories: Sequence[Memory]) -> Memory:
    sizes_of = [asdict(memory) for memory in memories]
    return Memory(**{name: sum(sizes[name] for sizes in sizes_of) for name in sizes_of[0]})


def _serve(parent: Connection, folder: Path, options: RuntimeOptions) -> None:
    """Take a step each time the parent asks, and tell its result; runs in the child process."""
    try:
        for result in _steps(folder, options):
            parent.recv()
            parent.send(result)
        parent.recv()  # until it is killed
    except AlbertServeError as error:
        parent.send(error)
    except EOFError:  # the parent has ended
        pass


def _steps(folder: Path, options: RuntimeOptions) -> Iterator[object]:
    """Yield the memory, the seconds and bytes of making sessions, the memory, the mapped bytes."""
    yield read_memory()
    bundle = Bundle.open(folder)
    before, started_s = read_memory(), time.perf_counter()
    engine = Engine.open(bundle, options)
    sessions_s = time.perf_counter() - started_s
    packed_bytes = max(0, read_memory().anonymous_bytes - before.anonymous_bytes)
    engine.warm_up()
    yield sessions_s, packed_bytes
    yield read_memory()
    yield _mapped_pss_bytes((WEIGHTS_FILE, PACKED_FILE))
