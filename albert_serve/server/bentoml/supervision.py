"""The supervisor process, which starts and watches the workers; BentoML has no settings for it.

The supervisor is circus' arbiter: circus' classes are patched in that process before it makes its
watchers. The versions are pinned, and the tests of workers hold the patches. A worker watches its
supervisor in turn (`end_with`).
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import shutil
import signal
import tempfile
from functools import partialmethod
from pathlib import Path
from typing import Any, Final

from circus.controller import Controller  # type: ignore[import-untyped]
from circus.process import DEAD_OR_ZOMBIE, UNEXISTING  # type: ignore[import-untyped]
from circus.watcher import Watcher  # type: ignore[import-untyped]
from prometheus_client.multiprocess import mark_process_dead

from albert_serve.server.logging import log_output
from albert_serve.settings import (
    METRICS_VARIABLE,
    SUPERVISOR_VARIABLE,
    allocator_variables,
    metrics_folder,
    supervisor_pid,
)

SERVICE_NAME: Final = "albert_serve"
_MAX_FAILED_STARTS: Final = 5
_STARTED: Final = "started-{}"
_CHECK_EVERY_S: Final = 1.0
# The usual cause if a signal that we did not send ends a worker.
_REASONS: Final[dict[int, str]] = {
    signal.SIGBUS: (
        "a file of a served bundle was cut short or written over in place; replace bundles by "
        "renaming them"
    ),
    signal.SIGKILL: "another process killed it, or the system ran out of memory",
}
_logger = logging.getLogger(__name__)


def supervise() -> None:
    """Replace dead workers within 2 s, in containers too.

    By default BentoML checks for dead ones every 10 s, never restarts them in a container, keeps
    their gauges, has one folder of metrics for all services of a user, and restarts workers that
    die at once for ever.
    """
    metrics = Path(tempfile.mkdtemp(prefix="albert-serve-metrics-"))
    atexit.register(shutil.rmtree, metrics, ignore_errors=True)
    Watcher.__init__ = partialmethod(_watch, Watcher.__init__, _Workers(metrics))
    Watcher.manage_processes = _replace_dead
    Controller.start = partialmethod(_start_checking_often, Controller.start)


def mark_started() -> None:
    """Tell the supervisor that this worker serves."""
    folder = metrics_folder()
    if folder is not None and supervisor_pid() is not None:
        with contextlib.suppress(OSError):  # the service can run without this file
            (folder / _STARTED.format(os.getpid())).touch()


def end_worker(error: Exception) -> None:
    """End this process with one line if it is a worker; BentoML would log tracebacks."""
    if supervisor_pid() is not None:
        _logger.error("this worker cannot start: %s", error)
        log_output().finish()
        os._exit(1)


async def end_with(supervisor: int) -> None:
    """Wait until the supervisor has died, and end this worker, which would keep its port."""
    while os.getppid() == supervisor:
        await asyncio.sleep(_CHECK_EVERY_S)
    os.kill(os.getpid(), signal.SIGTERM)  # first, as nothing may read the log any more
    _logger.error("the supervisor, process %d, has died: this worker ends", supervisor)


class _Workers:
    """The hook that circus calls when a worker has died.

    Args:
        metrics: the folder of the workers' metrics, where each that serves leaves a file.
    """

    def __init__(self, metrics: Path) -> None:
        self.metrics = metrics
        self._num_failed_starts = 0

    def after_reap(
        self, *, watcher: Watcher, process_pid: int, exit_code: int | None, **_: Any
    ) -> None:
        """Log why a worker has died, and end the service when five in a row never served."""
        # Otherwise the gauges of the dead worker would be counted for ever.
        mark_process_dead(process_pid, str(self.metrics))  # type: ignore[no-untyped-call]
        if watcher.is_stopping():
            return
        number = -(exit_code or 0)
        if number in _REASONS:
            name = signal.Signals(number).name
            _logger.error("worker %d was ended by %s: %s", process_pid, name, _REASONS[number])
        self._note_start(self.metrics / _STARTED.format(process_pid))
        if self._num_failed_starts >= _MAX_FAILED_STARTS:
            _logger.error(
                "workers died %d times in a row before they served; the log has why: "
                "the service ends",
                self._num_failed_starts,
            )
            raise SystemExit(1)  # the other workers see that their supervisor has gone

    def _note_start(self, started: Path) -> None:
        self._num_failed_starts = 0 if started.exists() else self._num_failed_starts + 1
        started.unlink(missing_ok=True)


def _watch(watcher: Watcher, init: Any, workers: _Workers, *args: Any, **options: Any) -> None:
    """Make a watcher, whose workers are replaced; ours know their supervisor.

    Workers of another service, which composes ours, share BentoML's metrics with it, and never tell
    that they have started.
    """
    env = dict(options.pop("env", None) or {})
    if SERVICE_NAME in (options.get("args") or ()):
        env = allocator_variables() | env
        env |= {METRICS_VARIABLE: str(workers.metrics), SUPERVISOR_VARIABLE: str(os.getpid())}
        options["hooks"] = {"after_reap": (workers.after_reap, False)}
    init(watcher, *args, **options | {"respawn": True}, env=env)


async def _replace_dead(watcher: Watcher) -> None:
    """Reap the dead workers of a watcher, and start others.

    Circus' own forgets a worker without `after_reap` that died since it last reaped.
    """
    if watcher.is_stopped():
        return
    for process in list(watcher.processes.values()):
        if process.status in (DEAD_OR_ZOMBIE, UNEXISTING):
            watcher.reap_process(process.pid)
    if len(watcher.processes) < watcher.numprocesses and not watcher.is_stopping():
        await watcher.spawn_processes()


def _start_checking_often(controller: Controller, start: Any) -> Any:
    controller.check_delay = _CHECK_EVERY_S * 1000
    return start(controller)
