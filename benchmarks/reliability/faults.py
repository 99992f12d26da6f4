"""Faults under load: the service ends, loses a worker, or changes its model."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Final

from benchmarks.harness.load import loading
from benchmarks.harness.plan import ClosedLoop, Plan
from benchmarks.harness.replies import LoadResult
from benchmarks.reliability.host import BundleLink, Service, mixed_requests, revision_of, serving
from benchmarks.reliability.pressure import Setting, counted
from benchmarks.reliability.report import Result

_CONNECTIONS: Final = 16
_GRACE_S: Final = 2.0
_BACK_TIMEOUT_S: Final = 60.0


def sigterm(setting: Setting) -> Result:
    """Clients as behind a load balancer: nothing new once /readyz is not 200."""
    asked_s = 0.0

    def end(service: Service) -> None:
        nonlocal asked_s
        asked_s = time.monotonic()
        service.process.send_signal(signal.SIGTERM)

    settings = {"DRAIN_GRACE_S": str(_GRACE_S)}
    with serving(setting.bundle, setting.folder / "sigterm", settings) as service:
        result = _disturbed(service, setting.seconds, end, watch_s=0.1)
        status = service.process.wait(timeout=60)
        took_s = time.monotonic() - asked_s
    noticed_s = float("nan") if result.stopped_s is None else result.stopped_s - asked_s
    return Result(
        name="sigterm",
        figures={
            "replies": counted(result),
            "asked after the signal": str(sum(r.due_s > asked_s for r in result.replies)),
            "not ready after, s": f"{noticed_s:.2f}",
            "ended after, s": f"{took_s:.1f}",
            "exit status": str(status),
        },
        checks={
            "nothing is lost": result.num_others == 0 and result.num(200) > 0,
            "not ready before it ends": result.stopped_s is not None,
            "it ends by itself": status == 0,
        },
    )


def killed_worker(setting: Setting) -> Result:
    """One of two workers is killed."""
    back_s = float("nan")

    def kill(service: Service) -> None:
        nonlocal back_s
        before = service.workers
        killed_s = time.monotonic()
        os.kill(before[0], signal.SIGKILL)
        while time.monotonic() - killed_s < _BACK_TIMEOUT_S:
            fresh = set(service.workers) - set(before)
            if fresh and service.log.count(_STARTED) >= 3:
                back_s = time.monotonic() - killed_s
                return
            time.sleep(0.05)

    with serving(setting.bundle, setting.folder / "killed", {"WORKERS": "2"}) as service:
        _wait_for(lambda: service.log.count(_STARTED) >= 2)
        result = _disturbed(service, max(setting.seconds, 30.0), kill)
        num_workers = len(service.workers)
    return Result(
        name="killed-worker",
        figures={
            "replies": counted(result),
            "connections": str(_CONNECTIONS),
            "back after, s": f"{back_s:.1f}",
        },
        checks={
            "only what it held is lost": result.num_others <= _CONNECTIONS,
            "it comes back": num_workers == 2 and back_s == back_s,
        },
    )


_REJECTED: Final = "was not loaded, the one before goes on"
_STARTED: Final = "initialized"  # BentoML logs it once a worker


def reload(setting: Setting) -> Result:
    """Another bundle, the first one again, and one that does not verify, by SIGHUP each."""
    bundles = BundleLink.make(setting.bundle, setting.folder / "reload")
    is_loaded: list[bool] = []

    def change(service: Service) -> None:
        for name in ("other", "first"):
            bundles.put(name)
            service.process.send_signal(signal.SIGHUP)
            revision = revision_of(bundles.folder / name)
            _wait_for(lambda revision=revision: service.revision == revision)  # type: ignore[misc]
            is_loaded.append(service.revision == revision)
        bundles.put("damaged")
        service.process.send_signal(signal.SIGHUP)
        _wait_for(lambda: _REJECTED in service.log)

    with serving(bundles.link, setting.folder / "reload") as service:
        result = _disturbed(service, setting.seconds, change)
        is_rejected = _REJECTED in service.log
        kept = service.revision == revision_of(bundles.folder / "first")
    return Result(
        name="reload",
        figures={"replies": counted(result), "p99, ms": f"{result.latency_ms(99):.0f}"},
        checks={
            "nothing is lost": result.num_others == 0,
            "each change is taken": is_loaded == [True, True],
            "what does not verify is rejected, and the one before goes on": is_rejected and kept,
        },
    )


def _disturbed(
    service: Service,
    seconds: float,
    disturb: Callable[[Service], None],
    watch_s: float | None = None,
) -> LoadResult:
    """Ask in a closed loop, and do something to the service when a quarter of that has passed."""
    plan = Plan(
        port=service.port,
        requests=mixed_requests(),
        pattern=ClosedLoop(num_connections=_CONNECTIONS, duration_s=seconds),
        watch_s=watch_s,
    )
    with loading(plan) as result:
        time.sleep(seconds / 4)
        disturb(service)
        return result()


def _wait_for(holds: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + _BACK_TIMEOUT_S
    while not holds() and time.monotonic() < give_up_s:
        time.sleep(0.1)
