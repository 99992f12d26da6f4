"""A program that is given until a certain time, and told to stop before it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Final

_ENDING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_LOOK_EVERY_S: Final = 0.2
_TETHERED: Final = Path(__file__).with_name("tethered.py")


@dataclass(kw_only=True)
class Deadline:
    """When a program is told to stop, and when it is ended; seconds of the monotonic clock.

    Inside `with`, a signal to this process moves it to now: the program stops as if in time.
    """

    stop_at: float
    kill_at: float

    @contextmanager
    def moved_by_signals(self) -> Iterator[None]:
        """Inside `with`, SIGTERM, SIGINT and SIGHUP move the time to stop to now."""
        before = {number: signal.signal(number, self._handle) for number in _ENDING}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.stop_at = min(self.stop_at, time.monotonic())


def run_until(
    command: Sequence[str],
    deadline: Deadline,
    *,
    folder: Path,
    environment: Mapping[str, str],
    lock: IO[str],
) -> int:
    """Run a program, tell it to stop with SIGTERM in time, and end it if it does not.

    Should this process be killed, the program is told to stop, too.

    Args:
        command: begins with the program's path.
        folder: where it runs.
        lock: held by the program, too; its number is written there.

    Returns the status as `subprocess` gives it: minus the signal's number where one ended it.
    """
    with deadline.moved_by_signals():
        process = subprocess.Popen(
            [sys.executable, str(_TETHERED), *command],
            cwd=folder,
            env=dict(environment),
            pass_fds=[lock.fileno()],
            # Of a Ctrl-C this process alone hears, and tells the program once: twice ends it.
            start_new_session=True,
        )
        lock.write(f"{process.pid}\n")
        lock.flush()
        return _wait(process, deadline)


def _wait(process: subprocess.Popen[bytes], deadline: Deadline) -> int:
    is_told = False
    while (status := process.poll()) is None:
        now = time.monotonic()
        if now >= deadline.kill_at:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        elif now >= deadline.stop_at and not is_told:
            process.terminate()
            is_told = True
        time.sleep(_LOOK_EVERY_S)
    return status
