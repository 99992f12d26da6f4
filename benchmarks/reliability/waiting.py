"""The longest wait of one caller beside another: a search for the worst mix of requests.

A small caller asks twenty times a second, beside a fuzzer that sends one mix of hostile requests
after another over up to 24 connections: first each kind alone, then mixes by chance and changed
ones of those that made the small caller wait longest. A mix that is over the limit is sent again,
and counts with the shorter wait.

Memory is compared at rest, some seconds after the last request: after a warm-up, in which each kind
is sent at its largest over all connections, and after the search. So what the service takes once
for its largest load does not count as growth, and what it goes on taking does.

Prints the worst mixes and the memory; exits with 1 if the small caller waited over a second longer
than alone, was not answered, or the memory grew by over 5 %.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from random import Random
from statistics import median
from typing import Final

from tqdm import tqdm

from albert_serve.settings import num_usable_cpus
from benchmarks.harness.load import http_request, send
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.plan import OpenLoop, Plan
from benchmarks.harness.replies import LoadResult
from benchmarks.harness.service import REPOSITORY
from benchmarks.harness.tables import bullets, table, write_between
from benchmarks.reliability.host import Service, serving
from benchmarks.reliability.hostile import KINDS
from benchmarks.reliability.mixes import (
    MAX_CONNECTIONS,
    Attack,
    Mix,
    Stream,
    changed,
    random_mix,
    read,
    send_mix,
)
from benchmarks.reliability.mixes import write as written
from training.system.command_line import make_parser

MAX_WAIT_S: Final = 1.0
MAX_GROWTH: Final = 0.05
_RATE_PER_S: Final = 20.0
_LEAD_S: Final = 0.2
# Of the small caller after the attack: what was sent last is answered or given up by then.
_AFTER_S: Final = 1.0
# The service returns memory to the system some time after a large request.
_SETTLE_S: Final = 1.5
_REST_S: Final = 10.0
_NUM_AT_REST: Final = 5
_CURVE_EVERY_MIN: Final = 5.0
_PAGE: Final = REPOSITORY / "docs/reliability.md"
_BEGIN: Final = "<!-- waiting: python -m benchmarks.reliability.waiting --write -->"
_END: Final = "<!-- end of waiting -->"
_NUM_KEPT: Final = 12
_NEW_SHARE: Final = 0.3
_NUM_SHOWN: Final = 10
_TIMEOUT_S: Final = 20.0
_EXAMPLES: Final = """\
examples:
  python -m benchmarks.reliability.waiting --write
  python -m benchmarks.reliability.waiting --minutes 5 --keep worst.txt
  python -m benchmarks.reliability.waiting --mix "cut-text@1.00x4/reads headers@1.00x2/leaves"
"""
_SMALL: Final = (
    ("/text-classification", "A short run."),
    ("/fill-mask", "One [MASK] after another."),
    ("/question-answering", {"question": "Who ran?", "context": "A man ran home."}),
    ("/sentence-order", {"text": "He ran.", "text_pair": "He won."}),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """The result of a mix.

    Attributes:
        wait_s: the longest that the small caller waited for a reply.
        median_s: the median of its waits.
        statuses: of the replies to the small caller.
        num_sent: requests of the mix.
        memory_mb: of the service, afterwards.
        minute: since the search began.
    """

    mix: Mix
    wait_s: float
    median_s: float
    statuses: Counter[int]
    num_sent: int
    memory_mb: float
    minute: float = 0.0


@dataclass(kw_only=True, slots=True)
class Search:
    """All trials so far.

    Attributes:
        alone_s: the small caller's median wait with nobody beside it.
        start_mb: memory of the service that has just started.
        warm_mb: memory at rest, before the first trial.
        end_mb: memory at rest, after the last.
        first: the mixes to begin with.
    """

    alone_s: float
    start_mb: float
    warm_mb: float
    end_mb: float = 0.0
    first: Sequence[Mix] = ()
    trials: list[Trial] = field(default_factory=list)

    @property
    def growth(self) -> float:
        """The growth of the memory from rest to rest: 0.05 is 5 %."""
        return self.end_mb / self.warm_mb - 1

    @property
    def worst(self) -> list[Trial]:
        """The trials, the longest wait first."""
        return sorted(self.trials, key=lambda trial: -trial.wait_s)

    def next_mix(self, chance: Random) -> Mix:
        """Return a mix to try: the first, then new ones and changed ones of the worst."""
        if len(self.trials) < len(self.first):
            return self.first[len(self.trials)]
        if chance.random() < _NEW_SHARE:
            return random_mix(chance)
        kept = [trial.mix for trial in self.worst[:_NUM_KEPT]]
        return changed(chance.choice(kept), kept, chance)


class Beside:
    """A small caller beside a fuzzer, in a process of its own each."""

    def __init__(self, service: Service, pool: ProcessPoolExecutor) -> None:
        self._service = service
        self._pool = pool
        self._began_s = time.monotonic()

    def begin(self) -> None:
        """Count minutes from now."""
        self._began_s = time.monotonic()

    def memory_at_rest_mb(self) -> float:
        """Memory of the service when it has nothing to do: the median of some seconds."""
        time.sleep(_REST_S)
        sizes_mb = []
        for _ in range(_NUM_AT_REST):
            sizes_mb.append(self._service.pss_mb)
            time.sleep(1.0)
        return median(sizes_mb)

    def alone(self, seconds: float) -> LoadResult:
        """The small caller, with nobody beside it."""
        return self._pool.submit(send, self._plan(seconds)).result()

    def warm_up(self, seconds: float) -> None:
        """Send each kind for a time: what is held once is held from the start."""
        for kind in KINDS:
            mix = (Stream(kind=kind, num_connections=MAX_CONNECTIONS),)
            attack = Attack(mix=mix, port=self._service.port, seconds=seconds)
            self._pool.submit(send_mix, attack).result()

    def trial(self, mix: Mix, seconds: float) -> Trial:
        """The small caller beside a mix."""
        small = self._pool.submit(send, self._plan(_LEAD_S + seconds + _AFTER_S))
        time.sleep(_LEAD_S)
        attack = Attack(mix=mix, port=self._service.port, seconds=seconds)
        num_sent = self._pool.submit(send_mix, attack).result()
        outcome = small.result()
        time.sleep(_SETTLE_S)
        waits_s = [reply.latency_s for reply in outcome.replies]
        return Trial(
            mix=mix,
            wait_s=max(waits_s),
            median_s=median(waits_s),
            statuses=Counter(outcome.statuses),
            num_sent=num_sent,
            memory_mb=self._service.pss_mb,
            minute=(time.monotonic() - self._began_s) / 60,
        )

    def _plan(self, seconds: float) -> Plan:
        requests = [http_request(path, {"inputs": inputs}) for path, inputs in _SMALL]
        return Plan(
            port=self._service.port,
            requests=requests,
            pattern=OpenLoop(rate_per_s=_RATE_PER_S, duration_s=seconds),
            timeout_s=_TIMEOUT_S,
        )


@contextmanager
def beside(service: Service) -> Iterator[Beside]:
    """Start the two processes."""
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        yield Beside(service, pool)


def search(
    caller: Beside, *, first: Sequence[Mix], minutes: float, seconds: float, seed: int
) -> Search:
    """Try mixes until the time is over.

    Args:
        first: the mixes to begin with.
        seconds: of each.
    """
    chance = Random(seed)
    start_mb = caller.memory_at_rest_mb()
    caller.warm_up(seconds)
    tried = _prepared(caller, first, start_mb)
    ends_s = time.monotonic() + minutes * 60
    with tqdm(disable=None, unit="mix") as bar:
        while time.monotonic() < ends_s:
            trial = caller.trial(tried.next_mix(chance), seconds)
            if trial.wait_s - tried.alone_s > MAX_WAIT_S:
                again = caller.trial(trial.mix, seconds)
                trial = min(trial, again, key=lambda one: one.wait_s)
            tried.trials.append(trial)
            bar.update()
            bar.set_postfix_str(f"worst {tried.worst[0].wait_s:.2f} s")
    tried.end_mb = caller.memory_at_rest_mb()
    return tried


def repeat(caller: Beside, mix: Mix, *, times: int, seconds: float) -> Search:
    """Try one mix again and again."""
    tried = _prepared(caller, (mix,), caller.memory_at_rest_mb())
    tried.trials = [caller.trial(mix, seconds) for _ in range(times)]
    tried.end_mb = caller.memory_at_rest_mb()
    return tried


def _prepared(caller: Beside, first: Sequence[Mix], start_mb: float) -> Search:
    alone_s = median(caller.alone(5.0).latencies_s())
    warm_mb = caller.memory_at_rest_mb()
    caller.begin()
    return Search(alone_s=alone_s, start_mb=start_mb, warm_mb=warm_mb, first=first)


def report(tried: Search) -> str:
    """Return the worst trials and the memory, as Markdown."""
    statuses = sum((trial.statuses for trial in tried.trials), Counter[int]())
    num_sent = sum(trial.num_sent for trial in tried.trials)
    most = max(trial.memory_mb for trial in tried.trials)
    answered = ", ".join(f"{num:,} x {status}" for status, num in statuses.items())
    lines = f"""\
- {len(tried.trials)} mixes of {len(KINDS)} kinds in {tried.trials[-1].minute:.0f} minutes, \
{num_sent:,} requests.
- The small caller waited {tried.worst[0].wait_s:.2f} s at most; alone its median is \
{tried.alone_s * 1000:.0f} ms. Its replies: {answered}.
- Memory at the start: {tried.start_mb:.0f} MB; at rest after the warm-up: {tried.warm_mb:.0f} MB; \
most after a mix: {most:.0f} MB; at rest after the search: {tried.end_mb:.0f} MB; growth \
{tried.growth:+.1%}.
- Memory after mixes, minutes and MB (medians): {_curve(tried.trials)}."""
    rows = map(_row, tried.worst[:_NUM_SHOWN])
    return f"{lines}\n\n{table(['mix', 'longest wait, s', 'median, s'], rows)}\n"


def _curve(trials: Sequence[Trial]) -> str:
    spans: dict[int, list[float]] = {}
    for trial in trials:
        spans.setdefault(int(trial.minute / _CURVE_EVERY_MIN), []).append(trial.memory_mb)
    return ", ".join(
        f"{span * _CURVE_EVERY_MIN:.0f}: {median(sizes):.0f}" for span, sizes in spans.items()
    )


def _row(trial: Trial) -> list[str]:
    return [f"`{written(trial.mix)}`", f"{trial.wait_s:.2f}", f"{trial.median_s:.2f}"]


def failures(tried: Search) -> list[str]:
    """Return what does not hold."""
    broken = []
    worst = tried.worst[0]
    if worst.wait_s - tried.alone_s > MAX_WAIT_S:
        broken.append(f"the small caller waited {worst.wait_s:.2f} s beside {written(worst.mix)}")
    unanswered = [trial for trial in tried.trials if set(trial.statuses) - {200, 429}]
    if unanswered:
        trial = unanswered[0]
        broken.append(f"the small caller got {dict(trial.statuses)} beside {written(trial.mix)}")
    if tried.growth > MAX_GROWTH:
        broken.append(f"the memory grew by {tried.growth:.1%}")
    return broken


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    options = _parser().parse_args(arguments)
    machine = bullets(describe_machine(num_usable_cpus()))
    with (
        tempfile.TemporaryDirectory() as made,
        serving(options.bundle, options.logs or Path(made)) as service,
        beside(service) as caller,
    ):
        if options.mix:
            mix = read(options.mix)
            tried = repeat(caller, mix, times=options.times, seconds=options.seconds)
        else:
            tried = search(
                caller,
                first=_read_kept(options.keep) or [(Stream(kind=kind),) for kind in KINDS],
                minutes=options.minutes,
                seconds=options.seconds,
                seed=options.seed,
            )
    text = f"{machine}\n{report(tried)}"
    print(text)
    if options.write:
        write_between(_PAGE, _BEGIN, _END, text)
    if options.keep:
        kept = [written(trial.mix) for trial in tried.worst[:_NUM_KEPT]]
        options.keep.write_text("\n".join(kept) + "\n", encoding="utf-8")
    found = failures(tried)
    for text in found:
        print(f"error: {text}", file=sys.stderr)
    return 1 if found else 0


def _read_kept(file: Path | None) -> list[Mix]:
    if file is None or not file.is_file():
        return []
    return [read(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("benchmarks.reliability.waiting", __doc__, _EXAMPLES)
    add = parser.add_argument
    add("--minutes", type=float, default=30.0, help="of the search (%(default)s)")
    add("--seconds", type=float, default=2.0, help="of each mix (%(default)s)")
    add("--seed", type=int, default=0, help="of the mixes (%(default)s)")
    add("--mix", help="try this one only")
    add("--times", type=int, default=3, help="how often to try it (%(default)s)")
    add("--keep", type=Path, metavar="FILE", help="begin with its mixes; keep the worst there")
    add("--bundle", type=Path, help="bundle to serve (the shipped one)")
    add("--write", action="store_true", help=f"put the result into {_PAGE.name}")
    add("--logs", type=Path, metavar="DIR", help="keep the service's log there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
