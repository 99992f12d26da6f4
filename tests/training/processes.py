"""Commands of training in processes of their own, which can be killed anywhere.

They are forked from a server that has torch imported, so that a run of a few steps takes a moment.
What is to happen to one is a function of this module, which the process calls before it begins.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import count
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from threading import RLock
from typing import Any, Final, TypeAlias
from unittest.mock import patch

import torch
from tqdm import tqdm

from training.data.preparation import prepare
from training.loop.step import Run, StepResult

Fate: TypeAlias = Callable[[], None]

_CONTEXT: Final = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        *(f"training.commands.{verb}" for verb in ("finetune", "prepare", "pretrain")),
        __name__,
        *("torch._dynamo", "torch.utils.tensorboard"),
    ]
)
_TIMEOUT_S: Final = 120.0
_NAMES: Final = count()
_REPOSITORY: Final = Path(__file__).parents[2]
# The line of a process that another has left.
LOST: Final = (
    "error: Another process of the run has ended or cannot be reached. "
    "Repeat the command to resume from the last checkpoint.\n"
)
_CHANGING: Final = frozenset({"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.symlink"})


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A process that has ended: its status, or the negative number of the signal, and its words."""

    status: int
    out: str
    err: str


@dataclass(frozen=True, kw_only=True)
class Started:
    """A process that runs."""

    process: ForkServerProcess
    out: Path
    err: Path

    def wait(self) -> Ended:
        self.process.join(_TIMEOUT_S)
        status = self.process.exitcode
        if status is None:
            self.process.kill()
            self.process.join()
        assert status is not None, f"still there: {self.err.read_text()}"
        self.process.close()
        return Ended(status=status, out=self.out.read_text(), err=self.err.read_text())

    def wait_for(self, file: Path) -> None:
        """Wait until the process has made a file."""
        until = time.monotonic() + _TIMEOUT_S
        while not file.exists():
            assert self.process.is_alive(), self.err.read_text()
            assert time.monotonic() < until, f"no {file}"
            time.sleep(0.005)

    def send(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


def start(
    options: Sequence[str],
    folder: Path,
    *more: str,
    fate: Fate | None = None,
    program: str = "training.commands.pretrain",
    environment: Mapping[str, str] | None = None,
) -> Started:
    """Begin a command with an output folder; what it says goes to files beside that folder."""
    out, err = (folder.with_name(f"{folder.name}.{next(_NAMES)}.{kind}") for kind in ("out", "err"))
    folder.parent.mkdir(parents=True, exist_ok=True)
    arguments = [*options, "--output", str(folder), *more]
    process = _CONTEXT.Process(
        target=_run, args=(program, arguments, out, err, dict(environment or {}), fate)
    )
    process.start()
    return Started(process=process, out=out, err=err)


def run_in_process(options: Sequence[str], folder: Path, *more: str, **named: Any) -> Ended:
    """Run a command to its end, whichever that is."""
    return start(options, folder, *more, **named).wait()


def run_world(
    options: Sequence[str],
    folder: Path,
    *more: str,
    num_processes: int = 2,
    fates: Mapping[int, Fate] | None = None,
    program: str = "training.commands.pretrain",
) -> list[Ended]:
    """The same command in several processes that train together, as torchrun begins them.

    Fates are by rank.
    """
    world = {
        "TORCHELASTIC_RUN_ID": "test",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(num_processes),
    }
    started = [
        start(
            options,
            folder,
            *more,
            fate=(fates or {}).get(rank),
            program=program,
            environment={**world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(num_processes)
    ]
    return [each.wait() for each in started]


@contextmanager
def torchrun(
    options: Sequence[str], folder: Path, log: Path, *, verb: str = "pretrain"
) -> Iterator[subprocess.Popen[bytes]]:
    """Inside `with` a job of two processes runs; it has ended after it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "--no-python"]
    command += [str(Path(sys.executable).with_name("albert-serve")), verb, *options]
    with log.open("wb") as stream:
        job = subprocess.Popen(
            [*command, "--output", str(folder)],
            cwd=_REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=stream,
            stderr=stream,
        )
    try:
        yield job
        job.wait(_TIMEOUT_S)
    finally:
        job.kill()
        job.wait()


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port


def _run(
    program: str,
    arguments: list[str],
    out: Path,
    err: Path,
    environment: dict[str, str],
    fate: Fate | None,
) -> None:
    os.environ.update(environment)
    for number, file in ((1, out), (2, err)):
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(descriptor, number)
        os.close(descriptor)
    faulthandler.enable(2)  # where it crashes, should it
    faulthandler.dump_traceback_later(_TIMEOUT_S / 2, file=2)  # where it hangs, should it
    torch.set_num_threads(1)
    tqdm.set_lock(RLock())  # its own would outlive a process that is killed
    if fate is not None:
        fate()
    sys.exit(import_module(program).main(arguments))


def all_of(*fates: Fate) -> None:
    for fate in fates:
        fate()


def before_step(number: int, happens: Fate) -> None:
    """Before the step of that number, counted from 1, something happens."""

    def step(run: Run, done: float) -> StepResult:
        if run.progress.step + 1 == number:
            happens()
        return original(run, done)

    original = Run.step
    patch.object(Run, "step", step).start()


def prepare_parts(num_bytes: int) -> None:
    """A corpus is prepared in parts of so many bytes."""
    (prepare.__kwdefaults__ or {})["part_bytes"] = num_bytes


def get_signals(*numbers: int) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def signal_group(number: int) -> None:
    """The process and all that it began get the signal, as from a terminal or torchrun."""
    os.killpg(0, number)


def die_before_change(number: int, folder: Path) -> None:
    """The process is killed before its so manieth change to the files of a folder.

    A change is a file opened to be written, made, renamed, removed or put on the disk.
    """
    changes = count(1)
    sync = os.fsync

    def audited_sync(descriptor: int) -> None:
        sys.audit("os.fsync")
        sync(descriptor)

    def see(event: str, details: tuple[Any, ...]) -> None:
        if _changes(event, details, str(folder)) and next(changes) == number:
            die()

    patch.object(os, "fsync", audited_sync).start()
    sys.addaudithook(see)


def _changes(event: str, details: tuple[Any, ...], folder: str) -> bool:
    if event == "os.fsync":
        return True
    if event == "open":
        path, _, flags = details
        is_written = bool(flags & (os.O_WRONLY | os.O_RDWR))
        return is_written and isinstance(path, str) and path.startswith(folder)
    # What a tree is removed by names its files without their folder.
    return event in _CHANGING and (str(details[0]).startswith(folder) or "/" not in str(details[0]))


def write_no_file_over(num_bytes: int) -> None:
    """As on a disk that is full: a larger file cannot be written whole."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


def lead_a_group() -> None:
    """Make the process one that signals can be sent to with all that it begins."""
    with suppress(PermissionError):
        os.setsid()
