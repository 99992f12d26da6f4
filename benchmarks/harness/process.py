"""Processes of their own, which answer one message at a time and sleep in between.

Unlike those of `multiprocessing` they do not import the program that starts them, which would take
seconds and count as their memory. Messages are pickled.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, Final, Self, TypeVar

from training.errors import TrainingError

REPOSITORY: Final = Path(__file__).parents[2]
_END_S: Final = 30.0
# Threads of the previous worker that wait for work actively give up within this time.
_SETTLE_S: Final = 0.05

_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")


class BenchmarkError(TrainingError):
    """A benchmark that cannot be run."""


def failure_kind(message: str) -> str:
    """Return the cell of a table for a contestant that failed."""
    return "out of memory" if "out of memory" in message.lower() else "failed"


def last_line(log: Path) -> str:
    """Return the last line that a process printed: its error, as a rule."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")


class Channel:
    """A worker's side: messages from and to the process that started it."""

    def __init__(self, messages: IO[bytes], answers: IO[bytes]) -> None:
        self._messages, self._answers = messages, answers

    def receive(self) -> Any:
        """Wait for the next message; None at the end, where the worker has to end."""
        try:
            return pickle.load(self._messages)  # noqa: S301 - from the process above
        except EOFError:
            return None

    def send(self, message: Any) -> None:
        """Send the first message, or the answer to the one received."""
        pickle.dump(message, self._answers)
        self._answers.flush()


class Worker:
    """A process that runs `serve(channel, argument)` of a module; inside `with` it has started.

    Args:
        name: for error messages.
        environment: variables that are added to this process' own.
        log: file for everything that the process prints.
    """

    def __init__(
        self,
        name: str,
        module: str,
        argument: Any,
        *,
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._name, self._module, self._argument = name, module, argument
        self._environment, self._log = environment or {}, log
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, self._module],
                cwd=REPOSITORY,
                env={**os.environ, **self._environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self._send(self._argument)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, message: Any) -> Any:
        """Send a message, and wait for the answer.

        Raises:
            BenchmarkError: the process ended.
        """
        time.sleep(_SETTLE_S)
        self._send(message)
        return self.receive()

    def receive(self) -> Any:
        """Wait for the next answer, or for the first message; raises as `ask`."""
        assert self._running.stdout is not None
        try:
            return pickle.load(self._running.stdout)  # noqa: S301 - our own
        except (EOFError, pickle.UnpicklingError) as error:
            raise self._failure() from error

    def close(self) -> None:
        """End the process, if it has not ended."""
        if self._process is None:
            return
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    def _send(self, message: Any) -> None:
        assert self._running.stdin is not None
        try:
            pickle.dump(message, self._running.stdin)
            self._running.stdin.flush()
        except BrokenPipeError as error:
            raise self._failure() from error

    def _failure(self) -> BenchmarkError:
        status, line = self._running.wait(), last_line(self._log)
        return BenchmarkError(f"{self._name} ended with status {status}: {line} (see {self._log})")


def run_in_process(function: Callable[[_Argument], _Result], argument: _Argument) -> _Result:
    """Call a function of a module in a process of its own.

    Raises:
        BenchmarkError: the process failed.
    """
    with (
        tempfile.NamedTemporaryFile() as log,
        Worker(function.__module__, __name__, (function, argument), log=Path(log.name)) as worker,
    ):
        result: _Result = worker.receive()
    return result


def serve(channel: Channel, call: tuple[Callable[[Any], Any], Any]) -> None:
    """Be the process of one call."""
    function, argument = call
    channel.send(function(argument))


def _main() -> None:
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # the program's prints go to the log
        program = importlib.import_module(sys.argv[1])
        channel = Channel(sys.stdin.buffer, answers)
        program.serve(channel, channel.receive())


if __name__ == "__main__":
    _main()
