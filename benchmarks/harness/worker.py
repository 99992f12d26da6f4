"""A process that works in turns: it answers one message at a time and sleeps in between."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Final, Self

from benchmarks.harness.errors import BenchmarkError, last_line

_REPOSITORY: Final = Path(__file__).parents[2]
_END_S: Final = 30.0
# Threads of the previous worker that wait for work actively give up within this time.
_SETTLE_S: Final = 0.05


class Worker:
    """A process of a module that uses a `Channel`; inside `with` it is ready.

    Args:
        name: for error messages.
        module: gets `argument` as its only command-line argument.
        environment: variables that are added to this process' own.
        log: file for everything that the process prints.

    Raises:
        BenchmarkError: the process ended.
    """

    def __init__(
        self, *, name: str, module: str, argument: str, environment: Mapping[str, str], log: Path
    ) -> None:
        self._name = name
        self._command = [sys.executable, "-m", module, argument]
        self._environment = environment
        self._log = log
        self._process: subprocess.Popen[str] | None = None
        self.first_message: dict[str, Any] = {}

    def __enter__(self) -> Self:
        with self._log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=_REPOSITORY,
                env={**os.environ, **self._environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        try:
            self.first_message = self._receive()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it can answer."""
        return self._process is not None and self._process.poll() is None

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message, and wait for the answer.

        Raises:
            BenchmarkError: the process ended.
        """
        time.sleep(_SETTLE_S)
        try:
            print(json.dumps(message), file=self._pipe("stdin"), flush=True)
        except BrokenPipeError as error:
            raise self._failure() from error
        return self._receive()

    def close(self) -> None:
        """End the process, if it has not ended."""
        process = self._process
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue  # it has ended already
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _receive(self) -> dict[str, Any]:
        line = self._pipe("stdout").readline()
        if not line:
            raise self._failure()
        message: dict[str, Any] = json.loads(line)
        return message

    def _pipe(self, name: str) -> IO[str]:
        pipe: IO[str] | None = getattr(self._process, name)
        assert pipe is not None
        return pipe

    def _failure(self) -> BenchmarkError:
        assert self._process is not None
        status = self._process.wait()
        return BenchmarkError(
            f"{self._name} ended with status {status}: {last_line(self._log)} (see {self._log})"
        )
