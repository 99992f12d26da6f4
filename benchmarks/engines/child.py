"""The parent's side: the process of a contestant."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final

from benchmarks.engines.jobs import (
    MEMORY,
    PEAK,
    BenchmarkError,
    Job,
    Memory,
    Opened,
    Peak,
    Request,
    Turn,
    last_line,
)

_REPOSITORY: Final = Path(__file__).parents[2]
_END_S: Final = 30.0
# Threads that wait for work actively give up within this time, those of the process before.
_SETTLE_S: Final = 0.05


class Child:
    """A process that holds a model ready; inside `with` it is open and waits for its turns.

    Args:
        log: file that takes what the process prints.

    Raises:
        BenchmarkError: it ended before its time.
    """

    def __init__(self, job: Job, log: Path) -> None:
        self.job = job
        self._log = log
        self._process: subprocess.Popen[str] | None = None
        self._opened: Opened | None = None

    def __enter__(self) -> Child:
        with self._log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"benchmarks.engines.{self.job.variant.program}",
                 self.job.to_json()],
                cwd=_REPOSITORY,
                env=self.job.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )  # fmt: skip
        try:
            self._opened = Opened(**self._hear())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def opened(self) -> Opened:
        """How it came up."""
        assert self._opened is not None
        return self._opened

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it can be asked."""
        return self._process is not None and self._process.poll() is None

    def turn(self, request: Request) -> Turn:
        """Let it do what is asked for.

        Raises:
            BenchmarkError: it ended.
        """
        return Turn.from_message(self._ask(request))

    def peak(self) -> Peak:
        """What the machine can do now; of the process that measures it.

        Raises:
            BenchmarkError: it ended.
        """
        return Peak(**self._ask(Request(case=PEAK)))

    def memory(self) -> Memory:
        """What it takes now.

        Raises:
            BenchmarkError: it ended.
        """
        return Memory(**self._ask(Request(case=MEMORY)))

    def close(self) -> None:
        """End it; nothing happens where it has ended."""
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

    def _ask(self, request: Request) -> dict[str, Any]:
        time.sleep(_SETTLE_S)
        try:
            print(request.to_json(), file=self._pipe("stdin"), flush=True)
        except BrokenPipeError as error:
            raise self._failure() from error
        return self._hear()

    def _hear(self) -> dict[str, Any]:
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
            f"{self.job.name} ended with status {status}: {last_line(self._log)} (see {self._log})"
        )
