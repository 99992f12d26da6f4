"""Does the service keep its promises under overload and faults?

Starts real services on this machine and asks them from a process of its own: ten times of what
they can do, clients that do not wait, SIGTERM, a killed worker. Prints a table; exits with 1 if
something that was asked for is not met.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import psutil
from tqdm import tqdm

from albert_serve.default_bundle import shipped_bundle
from benchmarks.harness.load import (
    ClosedLoop,
    LoadPattern,
    LoadPlan,
    OpenLoop,
    allow_open_files,
    http_request,
    load,
    loading,
)
from benchmarks.harness.page import write_between
from benchmarks.harness.process import REPOSITORY
from benchmarks.harness.service import ServiceProcess, running_service
from benchmarks.harness.texts import WIKI
from training.system.command_line import make_parser

_PAGE: Final = REPOSITORY / "docs" / "reliability.md"
_BEGIN: Final = "<!-- figures: python -m benchmarks.reliability --write -->"
_END: Final = "<!-- end of figures -->"
_NOT_OF_FILES: Final = re.compile(r"^Pss_(?:Anon|Shmem): *(\d+) kB$", re.MULTILINE)
_WORKER: Final = "_bentoml_impl.worker.service"
_STARTED: Final = "initialized"  # BentoML logs it once a worker
# Past where more connections mean more replies.
_SATURATING: Final = 64
_FEW_CLIENTS: Final = 16
_MANY_CLIENTS: Final = 512
_MOST_GROWTH: Final = 0.05
_BACK_TIMEOUT_S: Final = 60.0
# In which a load balancer sees that a service is not ready.
_NOTICE_S: Final = 1.0
# Nothing is refused and nothing is late, as far as the settings go.
_PATIENT: Final = {"DEADLINE_S": "55", "MAX_WAIT_S": "55", "MAX_QUEUE_TOKENS": "100000000"}
# Makes the input of a task of four sentences.
_ITEMS: Final[dict[str, Callable[[Sequence[str]], Any]]] = {
    "fill-mask": lambda four: f"{four[0]} [MASK]",
    "text-classification": ". ".join,
    "question-answering": lambda four: {"question": "When was it?", "context": ". ".join(four)},
    "sentence-order": lambda four: {"text": four[0][:120], "text_pair": four[1][:120]},
}
_EXAMPLES: Final = """\
examples:
  python -m benchmarks.reliability
  python -m benchmarks.reliability overload sigterm --seconds 5
  python -m benchmarks.reliability overload --seconds 3600 --times 0.8

Nothing else should run on the machine meanwhile.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScenarioSettings:
    """The settings of scenarios.

    Attributes:
        bundle: to serve.
        folder: for logs.
        seconds: of a scenario's main part.
        times: of the capacity, the load of overload.
    """

    bundle: Path
    folder: Path
    seconds: float
    times: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ScenarioResult:
    """The measured values of a scenario by name, and whether each requirement was met."""

    figures: dict[str, str]
    checks: dict[str, bool]


def overload(settings: ScenarioSettings) -> ScenarioResult:
    """Ten times of the capacity, by the clock; for an hour and at 0.8 times it is a soak."""
    seconds = settings.seconds
    with serving(settings.bundle, settings.folder / "capacity", _PATIENT) as service:
        pattern = ClosedLoop(num_connections=_SATURATING, duration_s=max(1.0, seconds / 6))
        load(_plan(service, pattern))  # warm
        at_capacity = load(_plan(service, pattern))
    rate_per_s = settings.times * at_capacity.per_s
    # Refusals may be delayed by up to a second, and hold their connections.
    num_connections = max(1000, int(3 * rate_per_s))

    def plan(service: ServiceProcess, duration_s: float) -> LoadPlan:
        pattern = OpenLoop(
            rate_per_s=rate_per_s, duration_s=duration_s, num_connections=num_connections
        )
        return _plan(service, pattern)

    with serving(settings.bundle, settings.folder / "overload") as service:
        # What a full service holds is held from the start.
        load(plan(service, max(2.0, seconds / 6)))
        with _sampling(service, every_s=max(0.1, seconds / 200)) as samples_mb:
            result = load(plan(service, seconds))
    p99_ms, most_ms = result.latency_ms(99), 2 * at_capacity.latency_ms(99)
    return ScenarioResult(
        figures={
            "offered/s": f"{rate_per_s:.0f}",
            "replies": result.counts,
            "answered/s": f"{result.num(200) / seconds:.0f}",
            "p99 at capacity, ms": f"{at_capacity.latency_ms(99):.0f}",
            "p50, p99 of 200, ms": f"{result.latency_ms(50):.0f}, {p99_ms:.0f}",
            "p99 of 429, ms": f"{result.latency_ms(99, 429):.0f}",
            "memory, most, MB": f"{max(samples_mb):.0f}",
            "memory grew by": f"{growth(samples_mb):+.1%}",
        },
        checks={
            "every reply is 200 or 429": result.num_others == 0,
            "every 429 has Retry-After": result.num_bad_refusals == 0,
            "some are answered": result.num(200) > 0,
            "p99 of the accepted under twice that at capacity": p99_ms < most_ms,
            "memory within 5 %": abs(growth(samples_mb)) <= _MOST_GROWTH,
        },
    )


def retries(settings: ScenarioSettings) -> ScenarioResult:
    """512 clients that ignore Retry-After and ask again at once, against 16 clients.

    Both levels take turns on one service, so that a change of the machine's speed meets both.
    """
    duration_s = max(2.0, settings.seconds / 2)
    few, many = [
        ClosedLoop(num_connections=number, duration_s=duration_s)
        for number in (_FEW_CLIENTS, _MANY_CLIENTS)
    ]
    with serving(settings.bundle, settings.folder / "retries") as service:
        load(_plan(service, few))  # warm
        rounds = [(load(_plan(service, few)), load(_plan(service, many))) for _ in range(3)]
    few_per_s, many_per_s = (
        median(each.per_s for each in level) for level in zip(*rounds, strict=True)
    )
    replies = [reply for pair in rounds for reply in pair[1].replies]
    longest_s = max(reply.latency_s for reply in replies)
    return ScenarioResult(
        figures={
            f"answered/s of {_FEW_CLIENTS} clients": f"{few_per_s:.0f}",
            f"answered/s of {_MANY_CLIENTS} clients": f"{many_per_s:.0f}",
            "longest reply, ms": f"{longest_s * 1000:.0f}",
        },
        checks={
            f"at least 85 % of the replies of {_FEW_CLIENTS} clients": (
                many_per_s >= 0.85 * few_per_s
            ),
            "every reply is 200 or 429": all(
                each.num_others == 0 for pair in rounds for each in pair
            ),
        },
    )


def sigterm(settings: ScenarioSettings) -> ScenarioResult:
    """Clients as behind a load balancer: they stop within the time of grace after the signal."""
    environment = {"DRAIN_GRACE_S": str(2 * _NOTICE_S)}
    pattern = ClosedLoop(num_connections=_FEW_CLIENTS, duration_s=settings.seconds)
    with serving(settings.bundle, settings.folder / "sigterm", environment) as service:
        with loading(_plan(service, pattern)) as result:
            time.sleep(max(0.0, settings.seconds - _NOTICE_S))
            asked_s = time.monotonic()
            service.process.send_signal(signal.SIGTERM)
            while is_ready := service.get("/readyz")[0] == 200:
                if time.monotonic() - asked_s > _NOTICE_S:
                    break
            noticed_s = time.monotonic() - asked_s
            replies = result()
        status = service.process.wait(timeout=60)
        took_s = time.monotonic() - asked_s
    return ScenarioResult(
        figures={
            "replies": replies.counts,
            "asked after the signal": str(sum(r.due_s > asked_s for r in replies.replies)),
            "not ready after, s": f"{noticed_s:.2f}",
            "ended after, s": f"{took_s:.1f}",
        },
        checks={
            "nothing is lost": replies.num_others == 0 and replies.num(200) > 0,
            "not ready before it ends": not is_ready,
            "it ends by itself": status == 0,
        },
    )


def killed_worker(settings: ScenarioSettings) -> ScenarioResult:
    """One of two workers is killed."""
    pattern = ClosedLoop(num_connections=_FEW_CLIENTS, duration_s=max(settings.seconds, 30.0))
    with serving(settings.bundle, settings.folder / "killed", {"WORKERS": "2"}) as service:
        with loading(_plan(service, pattern)) as result:
            time.sleep(pattern.duration_s / 4)
            back_s = _kill_one(service)
            replies = result()
        num_workers = len(_workers(service))
    return ScenarioResult(
        figures={"replies": replies.counts, "back after, s": f"{back_s:.1f}"},
        checks={
            "only what it held is lost": replies.num_others <= _FEW_CLIENTS,
            "it comes back": num_workers == 2 and back_s < _BACK_TIMEOUT_S,
        },
    )


def _kill_one(service: ServiceProcess) -> float:
    """Kill a worker; return the seconds until there is another, or too many."""
    before = _workers(service)
    killed_s = time.monotonic()
    os.kill(before[0], signal.SIGKILL)
    while (passed_s := time.monotonic() - killed_s) < _BACK_TIMEOUT_S:
        if set(_workers(service)) - set(before) and service.log.count(_STARTED) >= 3:
            break
        time.sleep(0.05)
    return passed_s


_SCENARIOS: Final[dict[str, Callable[[ScenarioSettings], ScenarioResult]]] = {
    "overload": overload,
    "retries": retries,
    "sigterm": sigterm,
    "killed-worker": killed_worker,
}


@contextlib.contextmanager
def serving(
    bundle: Path, folder: Path, settings: Mapping[str, str] | None = None
) -> Iterator[ServiceProcess]:
    """Start `albert-serve serve`, wait until it is ready, and end it afterwards.

    Args:
        folder: where its log goes.
        settings: as ALBERT_SERVE_NAME, by NAME.
    """
    chosen = {f"ALBERT_SERVE_{name}": value for name, value in (settings or {}).items()}
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    served = {"PYTHONPATH": path, "ALBERT_SERVE_BUNDLE": str(bundle.absolute())}
    environment = {**os.environ, **served, **chosen}
    with running_service(["-m", "albert_serve", "serve"], folder, environment) as service:
        yield service


def _plan(service: ServiceProcess, pattern: LoadPattern) -> LoadPlan:
    return LoadPlan(port=service.port, requests=mixed_requests(), pattern=pattern)


def mixed_requests(num: int = 400) -> list[bytes]:
    """Return requests of four tasks, one to four texts each, of the repository's own articles."""
    chance = random.Random(0)
    lines = WIKI.read_text(encoding="utf-8").splitlines()
    texts = " ".join(json.loads(line)["text"] for line in lines).replace("\n", " ")
    sentences = [text.strip() for text in texts.split(". ") if 5 <= len(text.split()) <= 25]
    requests = []
    for _ in range(num):
        task, make = chance.choice([*_ITEMS.items()])
        starts = (chance.randrange(len(sentences) - 4) for _ in range(chance.choice([1, 1, 1, 4])))
        items = [make(sentences[start : start + 4]) for start in starts]
        parameters = {"truncation": "truncate"} if task == "text-classification" else {}
        requests.append(http_request(f"/{task}", {"inputs": items, "parameters": parameters}))
    return requests


def _processes(service: ServiceProcess) -> list[psutil.Process]:
    parent = psutil.Process(service.process.pid)
    return [parent, *parent.children(recursive=True)]


def _workers(service: ServiceProcess) -> list[int]:
    """Return the processes that answer."""
    pids = []
    for process in _processes(service):
        with contextlib.suppress(psutil.Error):
            if _WORKER in process.cmdline():
                pids.append(process.pid)
    return pids


def _memory_mb(service: ServiceProcess) -> float:
    """Return the memory of all its processes, shared pages counted once, those of files left out.

    Those are weights and libraries; how much of them is whose depends on who else reads them.
    """
    total_kb = 0
    for process in _processes(service):
        with contextlib.suppress(psutil.Error, OSError):
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii")
            total_kb += sum(map(int, _NOT_OF_FILES.findall(rollup)))
    return total_kb * 1024 / 1e6


@contextlib.contextmanager
def _sampling(service: ServiceProcess, *, every_s: float) -> Iterator[list[float]]:
    """Look at the service's memory, in MB, again and again."""
    samples_mb, done = [_memory_mb(service)], threading.Event()

    def look() -> None:
        while not done.wait(every_s):
            samples_mb.append(_memory_mb(service))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield samples_mb
    finally:
        done.set()
        thread.join()


def growth(samples: Sequence[float]) -> float:
    """Return the growth from the second to the last tenth, by their medians: 0.05 is 5 %."""
    tenth = max(1, len(samples) // 10)
    return median(samples[-tenth:]) / median(samples[tenth : 2 * tenth] or samples) - 1


def scenario_table(results: Mapping[str, ScenarioResult]) -> str:
    """Return the results in Markdown."""
    lines = ["| scenario | asked for | met | measured |", "| --- | --- | --- | --- |"]
    for name, result in results.items():
        measured = "; ".join(f"{figure}: {value}" for figure, value in result.figures.items())
        for index, (check, is_met) in enumerate(result.checks.items()):
            cells = ["" if index else name, check, "yes" if is_met else "**no**"]
            lines.append(f"| {' | '.join([*cells, '' if index else measured])} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    parser = make_parser("benchmarks.reliability", __doc__, _EXAMPLES)
    add, names = parser.add_argument, list(_SCENARIOS)
    add("scenarios", nargs="*", metavar="SCENARIO", help=f"of {', '.join(names)} (all)")
    add("--bundle", type=Path, default=shipped_bundle(), help="bundle to serve (the shipped one)")
    add("--seconds", type=float, default=20.0, help="of each (%(default)s)")
    add("--times", type=float, default=10.0, help="of the capacity, of overload (%(default)s)")
    add("--logs", type=Path, metavar="DIR", help="keep the services' logs there")
    add("--write", action="store_true", help=f"put the table into {_PAGE.name}")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.scenarios if name not in _SCENARIOS]
    if unknown:
        parser.error(f"no scenario {', '.join(unknown)}; there are {', '.join(names)}")
    allow_open_files()  # for services too, which inherit it
    results: dict[str, ScenarioResult] = {}
    with tempfile.TemporaryDirectory() as made:
        settings = ScenarioSettings(
            bundle=options.bundle,
            folder=options.logs or Path(made),
            seconds=options.seconds,
            times=options.times,
        )
        for name in tqdm(options.scenarios or names, disable=None, unit="scenario"):
            results[name] = _SCENARIOS[name](settings)
    print(scenario_table(results))
    if options.write:
        write_between(_PAGE, _BEGIN, _END, scenario_table(results))
    is_kept = all(is_met for result in results.values() for is_met in result.checks.values())
    return 0 if is_kept else 1


if __name__ == "__main__":
    sys.exit(main())
