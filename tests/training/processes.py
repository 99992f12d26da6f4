"""Training commands in separate processes, which tests can kill at any point.

The processes are forked from a server that has already imported torch, so a run of a few steps
takes only a moment. A hook is a function that the process calls before the command, for example to
kill itself before step 3. Hooks are functions of this module, because the process imports them.
"""

from __future__ import annotations

import faulthandler
import math
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
from safetensors.torch import load_file
from tqdm import tqdm

from training.data.preparation import prepare
from training.loop.step import Run, StepResult

Hook: TypeAlias = Callable[[], None]

_CONTEXT: Final = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        *(f"training.commands.{verb}" for verb in ("finetune", "prepare", "pretrain")),
        __name__,
        *("torch._dynamo", "torch.utils.tensorboard"),
    ]
)
_TIMEOUT_S: Final = 120.0
_FILE_NUMBERS: Final = count()
_REPOSITORY: Final = Path(__file__).parents[2]
LOST_PROCESS_ERROR: Final = (
    "error: Another process of the run has ended or cannot be reached. "
    "Repeat the command to resume from the last checkpoint.\n"
)
# An option that saves after every step.
SAVE_OFTEN: Final = ("--save-every", "0.0001s")
_CHANGE_EVENTS: Final = frozenset({"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.symlink"})


@dataclass(frozen=True, kw_only=True)
class FinishedProcess:
    """A process that has ended.

    Attributes:
        status: exit status, or the negative number of the signal that killed the process.
    """

    status: int
    out: str
    err: str


@dataclass(frozen=True, kw_only=True)
class RunningProcess:
    """A running process, and the files of its output."""

    process: ForkServerProcess
    out: Path
    err: Path

    def wait(self) -> FinishedProcess:
        self.process.join(_TIMEOUT_S)
        status = self.process.exitcode
        if status is None:
            self.process.kill()
            self.process.join()
        assert status is not None, f"timeout: {self.err.read_text()}"
        self.process.close()
        return FinishedProcess(status=status, out=self.out.read_text(), err=self.err.read_text())

    def wait_for(self, file: Path) -> None:
        """Wait until the process has created a file."""
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
    *extra_options: str,
    hook: Hook | None = None,
    program: str = "training.commands.pretrain",
    environment: Mapping[str, str] | None = None,
) -> RunningProcess:
    """Start a command with an output folder. Files next to that folder receive its output."""
    out, err = (
        folder.with_name(f"{folder.name}.{next(_FILE_NUMBERS)}.{kind}") for kind in ("out", "err")
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    arguments = [*options, "--output", str(folder), *extra_options]
    process = _CONTEXT.Process(
        target=_run, args=(program, arguments, out, err, dict(environment or {}), hook)
    )
    process.start()
    return RunningProcess(process=process, out=out, err=err)


def run_in_process(
    options: Sequence[str], folder: Path, *extra_options: str, **arguments: Any
) -> FinishedProcess:
    """Start a command, and wait for its end."""
    return start(options, folder, *extra_options, **arguments).wait()


def run_processes(
    options: Sequence[str],
    folder: Path,
    *extra_options: str,
    num_processes: int = 2,
    hooks: Mapping[int, Hook] | None = None,
    program: str = "training.commands.pretrain",
) -> list[FinishedProcess]:
    """Run a command in several processes that train together, as torchrun starts them.

    Args:
        hooks: hook of a process, by rank.
    """
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    world = {
        "TORCHELASTIC_RUN_ID": "test",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_processes),
    }
    processes = [
        start(
            options,
            folder,
            *extra_options,
            hook=(hooks or {}).get(rank),
            program=program,
            environment={**world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(num_processes)
    ]
    return [process.wait() for process in processes]


def check_ended(ended: Sequence[FinishedProcess], status: int = 0) -> None:
    """Check that all processes ended with a status, and that only the main process wrote output."""
    assert [process.status for process in ended] == [status] * len(ended), ended
    for process in ended[1:]:
        # If a process takes long, `dump_traceback_later` writes to its errors.
        assert process.out == ""
        assert process.err == "" or process.err.startswith("Timeout (")


def check_close(
    first_run: Path,
    second_run: Path,
    *,
    weights: float,
    metrics: float = 1e-5,
    ignored_weights: Collection[str] = (),
) -> None:
    """Check that two runs, which report every step, differ only by rounding.

    Args:
        weights: limit of the absolute differences of the weights.
        metrics: limit of the relative differences of the metrics.
    """
    # The fork server imports this module and does not need the imports of `support`.
    from tests.training.support import checkpoint_state, read_metrics

    first_lines, second_lines = read_metrics(first_run), read_metrics(second_run)
    steps = range(1, checkpoint_state(first_run)["step"] + 1)
    assert {line["step"] for line in first_lines} >= {*steps}
    for first, second in zip(first_lines, second_lines, strict=True):
        assert first.keys() == second.keys()
        for name in first.keys() - {"elapsed_s", "tokens_per_s"}:
            is_close = math.isclose(
                first[name], second[name], rel_tol=metrics, abs_tol=metrics / 10
            )
            assert is_close, (name, first, second)
    first_weights, second_weights = (
        load_file(folder / "checkpoint" / "model.safetensors") for folder in (first_run, second_run)
    )
    assert first_weights.keys() == second_weights.keys()
    for name in first_weights.keys() - {*ignored_weights}:
        assert (first_weights[name] - second_weights[name]).abs().max() < weights, name


@contextmanager
def torchrun(options: Sequence[str], folder: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Pretrain with torchrun in two processes within `with`, and wait for their end."""
    program = str(Path(sys.executable).with_name("albert-serve"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "--no-python", program, "pretrain", *options]
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


def _run(
    program: str,
    arguments: list[str],
    out: Path,
    err: Path,
    environment: dict[str, str],
    hook: Hook | None,
) -> None:
    os.environ.update(environment)
    for number, file in ((1, out), (2, err)):
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(descriptor, number)
        os.close(descriptor)
    faulthandler.enable(2)  # shows where the process crashes
    faulthandler.dump_traceback_later(_TIMEOUT_S / 2, file=2)  # shows where the process hangs
    torch.set_num_threads(1)
    tqdm.set_lock(RLock())  # the default lock would outlive a killed process
    if hook is not None:
        hook()
    sys.exit(import_module(program).main(arguments))


def run_all(*hooks: Hook) -> None:
    for hook in hooks:
        hook()


def before_step(number: int, action: Hook) -> None:
    """Perform an action before the n-th step, counted from 1."""

    def step(run: Run, done: float) -> StepResult:
        if run.progress.step + 1 == number:
            action()
        return original(run, done)

    original = Run.step
    patch.object(Run, "step", step).start()


def set_part_bytes(num_bytes: int) -> None:
    """Prepare corpora in parts of this number of bytes."""
    (prepare.__kwdefaults__ or {})["part_bytes"] = num_bytes


def raise_signals(*numbers: int) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def signal_group(number: int) -> None:
    """Send a signal to this process and its children, as a terminal or torchrun does."""
    os.killpg(0, number)


def die_before_change(number: int, folder: Path) -> None:
    """Kill the process before its n-th change to the files of a folder.

    Changes are: opening a file for writing; creating, renaming or removing a file or folder; and
    syncing any file to the disk.
    """
    changes = count(1)
    sync = os.fsync

    def audited_sync(descriptor: int) -> None:
        sys.audit("os.fsync")
        sync(descriptor)

    def audit(event: str, details: tuple[Any, ...]) -> None:
        if _changes(event, details, str(folder)) and next(changes) == number:
            kill_self()

    patch.object(os, "fsync", audited_sync).start()
    sys.addaudithook(audit)


def _changes(event: str, details: tuple[Any, ...], folder: str) -> bool:
    if event == "os.fsync":
        return True
    if event == "open":
        path, _, flags = details
        is_written = bool(flags & (os.O_WRONLY | os.O_RDWR))
        return is_written and isinstance(path, str) and path.startswith(folder)
    # `shutil.rmtree` names files without their folder.
    return event in _CHANGE_EVENTS and (
        str(details[0]).startswith(folder) or "/" not in str(details[0])
    )


def limit_file_size(num_bytes: int) -> None:
    """Make writing a larger file fail, as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


def start_process_group() -> None:
    """Start a process group, which can receive signals as a whole."""
    with suppress(PermissionError):
        os.setsid()
