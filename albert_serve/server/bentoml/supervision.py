"""What BentoML's process that watches over the workers does otherwise for this service.

It is circus' arbiter, and BentoML has no settings for these; so they are set on circus' classes,
in that process, before it makes its watchers. The versions are pinned, and tests see each of them.
"""

from __future__ import annotations

import signal
from functools import partialmethod
from pathlib import Path
from typing import Any, Final

import bentoml.serving
import psutil
from circus.controller import Controller  # type: ignore[import-untyped]
from circus.process import Process  # type: ignore[import-untyped]
from circus.watcher import Watcher  # type: ignore[import-untyped]
from prometheus_client.multiprocess import mark_process_dead

_CHECK_EVERY_MS: Final = 1000


def supervise() -> None:
    """Pass SIGHUP on to the workers, and soon start one anew that has died, also in a container.

    BentoML's own way with SIGHUP is to start new workers and end the old ones; it looks for dead
    ones every 10 s, and in a container leaves them dead. It keeps what they had in their gauges.
    """
    Watcher.__init__ = partialmethod(Watcher.__init__, send_hup=True)
    Process.spawn = partialmethod(_spawn_deaf, Process.spawn)
    Controller.start = partialmethod(_start_checking_often, Controller.start)
    vars(bentoml.serving)["running_inside_container"] = lambda: False


def _spawn_deaf(process: Process, spawn: Any) -> None:
    """A SIGHUP that comes while a worker starts would end it; so it waits until that listens."""
    _forget_dead(Path(process.env["PROMETHEUS_MULTIPROC_DIR"]))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})  # the child inherits it
    try:
        spawn(process)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})


def _forget_dead(metrics: Path) -> None:
    """What a worker that was killed had last in its gauges would else be counted for ever."""
    for file in metrics.glob("gauge_live*_*.db"):
        pid = int(file.stem.rpartition("_")[2])
        try:
            is_dead = psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            is_dead = True
        if is_dead:
            mark_process_dead(pid, str(metrics))  # type: ignore[no-untyped-call]


def _start_checking_often(controller: Controller, start: Any) -> Any:
    controller.check_delay = _CHECK_EVERY_MS
    return start(controller)
