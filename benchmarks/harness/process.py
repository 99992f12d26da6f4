"""Worker processes, which answer one message at a time and sleep in between.

A worker imports only the modules that it runs, so their memory can be measured.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from training.errors import TrainingError

REPOSITORY: Final = Path(__file__).parents[2]
_SPAWN: Final = multiprocessing.get_context("spawn")
_END_S: Final = 30.0
# Pause before a turn, in which the spinning threads of the previous worker go to sleep.
_SETTLE_S: Final = 0.05

_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")


class BenchmarkError(TrainingError):
    """A benchmark that cannot be run."""


def last_line(log: Path) -> str:
    """Return the last line that a process printed, usually its error."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")


class Worker:
    """A process that runs `serve(connection, argument)`, started by `with`.

    Args:
        name: name in error messages.
        serve: function that sends a first message, and then answers messages until it gets None.
        log: file for the output of the process.
        environment: variables to add to the inherited environment.
    """

    def __init__(
        self,
        name: str,
        serve: Callable[[Connection, Any], None],
        argument: Any,
        *,
        log: Path,
        environment: Mapping[str, str],
    ) -> None:
        self._name, self._log, self._environment = name, log, environment
        self._connection, self._other_end = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_run, args=(serve, self._other_end, argument, log))

    def __enter__(self) -> Self:
        with _with_variables(self._environment):
            self._process.start()
        self._other_end.close()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._connection.send(None)
        self._process.join(_END_S)
        self._process.kill()

    def ask(self, message: Any) -> Any:
        """Send a message, and wait for the answer."""
        time.sleep(_SETTLE_S)
        with contextlib.suppress(OSError):
            self._connection.send(message)
        return self.receive()

    def receive(self) -> Any:
        """Wait for the next answer, or for the first message.

        Raises:
            BenchmarkError: the process has ended.
        """
        try:
            return self._connection.recv()
        except (EOFError, OSError) as error:
            self._process.join(_END_S)
            status, line = self._process.exitcode, last_line(self._log)
            raise BenchmarkError(
                f"{self._name} ended with status {status}: {line}. See {self._log}."
            ) from error


@contextlib.contextmanager
def _with_variables(environment: Mapping[str, str]) -> Iterator[None]:
    """Add variables to the environment of the processes that are started within `with`."""
    original = dict(os.environ)
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(original)


def _run(
    serve: Callable[[Connection, Any], None], connection: Connection, argument: Any, log: Path
) -> None:
    with log.open("wb") as stream:
        for descriptor in (1, 2):
            os.dup2(stream.fileno(), descriptor)
    serve(connection, argument)


def run_in_process(function: Callable[[_Argument], _Result], argument: _Argument) -> _Result:
    """Call a function in a temporary process, and return its result."""
    with ProcessPoolExecutor(1, mp_context=_SPAWN) as pool:
        return pool.submit(function, argument).result()
