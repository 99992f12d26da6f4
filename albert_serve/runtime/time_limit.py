"""A time limit of runs, for graphs that somebody else wrote: one may loop without end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import onnxruntime as ort


class TimeLimit:
    """The runs of one `time_limit`.

    Attributes:
        is_over: whether the time is over; runs are terminated then.
    """

    def __init__(self) -> None:
        self.is_over = False
        self._runs: list[ort.RunOptions] = []
        self._lock = threading.Lock()

    def add(self, run: ort.RunOptions) -> None:
        """Let a run be terminated when the time is over."""
        with self._lock:
            self._runs.append(run)
            run.terminate = self.is_over

    def end(self) -> None:
        """Terminate the runs."""
        with self._lock:
            self.is_over = True
            for run in self._runs:
                run.terminate = True


_current: ContextVar[TimeLimit | None] = ContextVar("time_limit", default=None)


@contextmanager
def time_limit(timeout_s: float) -> Iterator[TimeLimit]:
    """Terminate the runs of this thread that do not end within `timeout_s`; they raise an error."""
    limit = TimeLimit()
    timer = threading.Timer(timeout_s, limit.end)
    timer.daemon = True
    token = _current.set(limit)
    timer.start()
    try:
        yield limit
    finally:
        timer.cancel()
        _current.reset(token)


def run_options() -> ort.RunOptions:
    """Return the options of a run, which ends with the current time limit if there is one."""
    options = ort.RunOptions()
    if (limit := _current.get()) is not None:
        limit.add(options)
    return options
