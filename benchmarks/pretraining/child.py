"""The parent's side: a child process that trains in turns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final

from benchmarks.pretraining.jobs import BenchmarkError, Job, Turn

_REPOSITORY: Final = Path(__file__).parents[2]
_END_S: Final = 30.0
_LINES_OF_LOG: Final = 5


class Child:
    """A process that does a job; inside `with` it is warm and waits for its turns.

    Args:
        log: file that takes what the process prints.

    Raises:
        BenchmarkError: it ended before its time.
    """

    def __init__(self, job: Job, log: Path) -> None:
        self.job = job
        self.warm_up_s = 0.0
        self._log = log
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Child:
        with self._log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self.job.program, self.job.to_json()],
                cwd=_REPOSITORY,
                env={**os.environ, **self.job.environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        try:
            self.warm_up_s = self._hear()["warm_up_s"]
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def turn(self, seconds: float) -> Turn:
        """Let it train for so long, and finish its step.

        Raises:
            BenchmarkError: it ended.
        """
        try:
            print(seconds, file=self._pipe("stdin"), flush=True)
        except BrokenPipeError as error:
            raise self._failure() from error
        return Turn.from_message(self._hear())

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
        last = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LINES_OF_LOG:]
        lines = "\n  ".join(last)
        return BenchmarkError(
            f"{self.job.name} ended with status {status}; see {self._log}:\n  {lines}"
        )

    def _end(self) -> None:
        assert self._process is not None
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue  # it has ended already
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
