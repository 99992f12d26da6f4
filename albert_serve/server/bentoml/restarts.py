"""When the supervisor starts a worker in the place of one that died, and when it gives up."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Set
from pathlib import Path
from typing import Final

from albert_serve.settings import metrics_folder, supervisor_pid

MAX_FAILED_STARTS: Final = 5
_STARTED: Final = "started-{}"
_MAX_DELAY_S: Final = 30.0
# A worker that has served this long was sound: what ended it is no crash loop.
_SOUND_AFTER_S: Final = 60.0
_END_AFTER_S: Final = 0.5
_logger = logging.getLogger(__name__)


class Restarts:
    """Delays restarts that follow each other closely, and ends the service if no worker starts.

    The first restart is immediate; 1 s, 2 s, 4 s and so on, up to 30 s, before the next ones, until
    a worker dies that had served for a minute. When five times in a row all that died had not
    served, and none that runs has, the service ends.

    Args:
        folder: where each worker that has started leaves a file (`mark_started`).
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pids: set[int] = set()
        self._num_failed = 0
        self._num_early = 0
        self._due_s = 0.0
        self._is_failed = False

    @property
    def are_due(self) -> bool:
        """Whether a worker may start now."""
        return not self._is_failed and time.monotonic() >= self._due_s

    def add(self, pid: int) -> None:
        """Note that a worker was started."""
        self._pids.add(pid)

    def keep(self, running: Set[int], num_workers: int) -> None:
        """Note which workers run; the others have died.

        Args:
            running: PIDs of the workers.
            num_workers: how many there should be. The first ones start together, and may fail one
                shortly after the other.
        """
        dead = self._pids - running
        self._pids -= dead
        if dead:
            self._note_deaths([_served_s(self._folder / _STARTED.format(pid)) for pid in dead])
        is_over = self._num_failed >= num_workers - 1 + MAX_FAILED_STARTS
        if self._is_failed or (is_over and not self._any_serves(running)):
            self._end()
        elif dead and self._num_early > 1:
            self._delay()

    def exit(self) -> None:
        """End the process with status 1 if the workers failed; BentoML would end it with 0."""
        if self._is_failed:
            logging.shutdown()
            os._exit(1)

    def _any_serves(self, running: Set[int]) -> bool:
        return any((self._folder / _STARTED.format(pid)).exists() for pid in running)

    def _note_deaths(self, served_s: list[float | None]) -> None:
        """Count failures and early deaths in a row; workers that die together count once.

        Args:
            served_s: for how long each worker has served; None: it died before.
        """
        is_failed = all(time_s is None for time_s in served_s)
        self._num_failed = self._num_failed + 1 if is_failed else 0
        is_early = any(time_s is None or time_s < _SOUND_AFTER_S for time_s in served_s)
        self._num_early = self._num_early + 1 if is_early else 0

    def _delay(self) -> None:
        delay_s = min(2.0 ** (self._num_early - 2), _MAX_DELAY_S)
        self._due_s = time.monotonic() + delay_s
        _logger.warning(
            "workers died %d times in a row within %.0f s of service; the next starts in %.0f s",
            self._num_early,
            _SOUND_AFTER_S,
            delay_s,
        )

    def _end(self) -> None:
        if not self._is_failed:
            _logger.error(
                "workers died %d times in a row before they served; the log has why: "
                "the service ends",
                self._num_failed,
            )
        self._is_failed = True
        # Later, and again if it is lost: circus drops a signal that comes while it starts a worker.
        threading.Timer(_END_AFTER_S, os.kill, (os.getpid(), signal.SIGTERM)).start()


def mark_started() -> None:
    """Tell the supervisor that this worker serves."""
    folder = metrics_folder()
    if folder is not None and supervisor_pid() is not None:
        (folder / _STARTED.format(os.getpid())).touch()


def end_worker(error: Exception) -> None:
    """End this process with one line if it is a worker; BentoML would log tracebacks."""
    if supervisor_pid() is not None:
        _logger.error("this worker cannot start: %s", error)
        logging.shutdown()
        os._exit(1)


def _served_s(file: Path) -> float | None:
    """Return the age of a worker's file, which is removed; None if there is none."""
    try:
        age_s = time.time() - file.stat().st_mtime
    except FileNotFoundError:
        return None
    file.unlink()
    return age_s
