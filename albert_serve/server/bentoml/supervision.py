"""The supervisor process, which starts and watches the workers. BentoML cannot configure it.

The supervisor is circus' arbiter. circus' class `Watcher` is patched in that process before any
watcher exists. The versions are pinned, and tests of workers cover the patch.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
from functools import partialmethod
from pathlib import Path
from typing import Any, Final

from circus.watcher import Watcher  # type: ignore[import-untyped]
from prometheus_client.multiprocess import mark_process_dead

from albert_serve.server.logging import log_output
from albert_serve.settings import (
    METRICS_VARIABLE,
    SUPERVISOR_VARIABLE,
    allocator_variables,
    supervisor_pid,
)

SERVICE_NAME: Final = "albert_serve"
_logger = logging.getLogger(__name__)


def supervise() -> None:
    """Replace dead workers, in containers too, and give this service its own metrics.

    By default, BentoML does not restart workers in a container, keeps the gauges of dead workers,
    and has one folder of metrics for all services of a user.
    """
    metrics = Path(tempfile.mkdtemp(prefix="albert-serve-metrics-"))
    atexit.register(shutil.rmtree, metrics, ignore_errors=True)
    Watcher.__init__ = partialmethod(_watch, Watcher.__init__, metrics)


def end_worker(error: Exception) -> None:
    """End this process with one log line if it is a worker. BentoML would log tracebacks."""
    if supervisor_pid() is not None:
        _logger.error("This worker cannot start. %s", error)
        log_output().finish()
        os._exit(1)


def _watch(watcher: Watcher, original_init: Any, metrics: Path, *args: Any, **options: Any) -> None:
    """Initialise a watcher that replaces its workers, and set variables for this service's workers.

    If another service composes this one, its workers share BentoML's metrics.
    """

    def remove_gauges(*, process_pid: int, **_: Any) -> bool:
        """Remove a dead worker's gauges, which would otherwise remain in the sums."""
        mark_process_dead(process_pid, str(metrics))  # type: ignore[no-untyped-call]
        return True

    env = dict(options.pop("env", None) or {})
    if SERVICE_NAME in (options.get("args") or ()):
        env = allocator_variables() | env
        env |= {METRICS_VARIABLE: str(metrics), SUPERVISOR_VARIABLE: str(os.getpid())}
        options["hooks"] = {"after_reap": (remove_gauges, False)}
    original_init(watcher, *args, **options | {"respawn": True}, env=env)
