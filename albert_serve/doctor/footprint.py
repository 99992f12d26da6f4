"""The memory of fresh processes that serve a bundle, and the time to open it.

Each process is `python -m albert_serve.doctor.footprint`, which answers lines of JSON: so that
all can be asked while all are alive.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Final

from albert_serve.bundle.manifest import WEIGHTS_FILE, Bundle
from albert_serve.doctor.memory import Memory, mapped_pss_bytes, read_memory
from albert_serve.doctor.products import run_product
from albert_serve.doctor.timing import time_once
from albert_serve.errors import AlbertServeError, EngineError
from albert_serve.runtime.engine import Engine
from albert_serve.runtime.prepacking import PACKED_FILE
from albert_serve.settings import RuntimeOptions

# A process that takes longer is killed, so that a diagnosis never hangs.
_TIMEOUT_S: Final = 300.0
_END_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Opening:
    """The time to open a bundle, in seconds.

    Attributes:
        check_s: reading and verifying its files.
        sessions_s: making the runtime's sessions of it.
        first_run_s: running every task once.
        packed_bytes: private memory of the sessions: packed weights and session overhead.
    """

    check_s: float
    sessions_s: float
    first_run_s: float
    packed_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """The memory of processes that serve one bundle, all alive at once.

    Attributes:
        num_processes: the number of processes.
        before: all together, with the runtime at work and no bundle opened.
        after: all together, after each has run every task.
        bundle_pss_bytes: what the bundle added to the PSS: weights, sessions and activations.
        bundle_over_weights: the same over the size of the weight file.
        weights_pss_bytes: of that the weights: pages of the weight file and of packed weights on
            disk, and the private memory that the sessions took.
        weights_over_file: the same over the size of the weight file.
        opening: of each process; several open at the same time.
    """

    num_processes: int
    before: Memory
    after: Memory
    bundle_pss_bytes: int
    bundle_over_weights: float
    weights_pss_bytes: int
    weights_over_file: float
    opening: list[Opening]


def measure_footprint(bundle: Bundle, options: RuntimeOptions, num_processes: int) -> Footprint:
    """Start processes, have each open the bundle and run all tasks, and add up their memory.

    Raises:
        EngineError: a process failed, was killed or took too long, or the system does not tell
            the memory of processes.
    """
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(_started(bundle.folder, options)) for _ in range(num_processes)
        ]
        before = _total(_ask(processes, "memory"))
        opening = [Opening(**answer) for answer in _ask(processes, "open")]
        after = _total(_ask(processes, "memory"))
        mapped_bytes = sum(answer["mapped"] for answer in _ask(processes, "weights"))
    added_bytes = after.pss_bytes - before.pss_bytes
    weights_bytes = mapped_bytes + sum(part.packed_bytes for part in opening)
    file_bytes = bundle.weights_file.stat().st_size
    return Footprint(
        num_processes=num_processes,
        before=before,
        after=after,
        bundle_pss_bytes=added_bytes,
        bundle_over_weights=added_bytes / file_bytes,
        weights_pss_bytes=weights_bytes,
        weights_over_file=weights_bytes / file_bytes,
        opening=opening,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Process:
    """A fresh process, and what it wrote to stderr."""

    process: subprocess.Popen[str]
    errors: IO[str]
    started_s: float

    def send(self, command: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # it is dead; `receive` raises the error
            _pipe(self.process.stdin).write(command + "\n")
            _pipe(self.process.stdin).flush()

    def receive(self) -> dict[str, Any]:
        line = _pipe(self.process.stdout).readline()
        if not line.endswith("\n"):
            raise EngineError(f"a process that opened the bundle {self._death()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineError(answer["error"])
        return answer

    def _death(self) -> str:
        status = self.process.wait()
        if time.monotonic() - self.started_s > _TIMEOUT_S:
            return f"took longer than {_TIMEOUT_S:.0f} s; try fewer workers"
        if status < 0:
            return f"was ended by signal {-status}; there may be too little memory for it"
        self.errors.seek(0)
        last = self.errors.read().strip().rpartition("\n")[2]
        return f"ended with status {status}: {last}"


@contextlib.contextmanager
def _started(folder: Path, options: RuntimeOptions) -> Iterator[_Process]:
    """Run a process that serves a bundle; it ends with the context."""
    arguments = json.dumps({"folder": str(folder), "options": asdict(options)}, default=str)
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors,
        subprocess.Popen(  # noqa: S603 - this package's own module
            [sys.executable, "-m", "albert_serve.doctor.footprint", arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        timer = threading.Timer(_TIMEOUT_S, process.kill)
        timer.start()
        try:
            yield _Process(process=process, errors=errors, started_s=time.monotonic())
        finally:
            timer.cancel()
            with contextlib.suppress(BrokenPipeError):
                _pipe(process.stdin).close()  # which ends it
            try:
                process.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _ask(processes: list[_Process], command: str) -> list[dict[str, Any]]:
    """Request all of them at once."""
    for process in processes:
        process.send(command)
    return [process.receive() for process in processes]


def _total(answers: list[dict[str, Any]]) -> Memory:
    return Memory(**{name: sum(answer[name] for answer in answers) for name in answers[0]})


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def _answer(commands: IO[str], answers: IO[str], arguments: dict[str, Any]) -> None:
    """Answer each line until the input ends; runs in the child process."""
    engines: list[Engine] = []  # kept alive while memory is measured
    for command in commands:
        try:
            if command.strip() == "memory":
                answer = asdict(_memory_now())
            elif command.strip() == "weights":
                answer = {"mapped": mapped_pss_bytes((WEIGHTS_FILE, PACKED_FILE))}
            else:
                engine, opening = open_timed(
                    Path(arguments["folder"]), _options(arguments["options"])
                )
                engines.append(engine)
                answer = asdict(opening)
        except AlbertServeError as error:
            answer = {"error": str(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def open_timed(folder: Path, options: RuntimeOptions) -> tuple[Engine, Opening]:
    """Open a bundle and run every task.

    Raises:
        AlbertServeError: it cannot be opened or run.
    """
    bundles: list[Bundle] = []
    engines: list[Engine] = []
    check_s = time_once(lambda: bundles.append(Bundle.open(folder)))
    before = read_memory()
    sessions_s = time_once(lambda: engines.append(Engine.open(bundles[0], options)))
    after = read_memory()
    packed_bytes = after.anonymous_bytes - before.anonymous_bytes if before and after else 0
    first_run_s = time_once(engines[0].warm_up)
    return engines[0], Opening(
        check_s=check_s,
        sessions_s=sessions_s,
        first_run_s=first_run_s,
        packed_bytes=max(0, packed_bytes),
    )


def _memory_now() -> Memory:
    memory = read_memory()
    if memory is None:
        raise EngineError("this system does not tell the memory of a process; only Linux does")
    return memory


def _options(arguments: dict[str, Any]) -> RuntimeOptions:
    folder = arguments["cache_folder"]
    return RuntimeOptions(**{**arguments, "cache_folder": Path(folder) if folder else None})


if __name__ == "__main__":
    run_product()  # so that the runtime's own pages are there before the first look at memory
    _answer(sys.stdin, sys.stdout, json.loads(sys.argv[1]))
