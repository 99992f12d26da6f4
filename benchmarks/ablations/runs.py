"""The runs of an ablation: each a pretraining of its own folder and process, then measured.

A run that was stopped goes on, and one that was measured is not repeated.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Final

import torch
from tqdm import tqdm

from benchmarks.ablations.findings import Result
from benchmarks.ablations.setup import AblationError, Setup, is_done, make_run, read_result
from benchmarks.ablations.tables import Variant
from training.errors import report_errors
from training.system.locking import locked_folder
from training.system.signals import StopFlag

_LOG: Final = "log.txt"
_POLL_S: Final = 0.5
_BAR: Final = "{percentage:3.0f}%|{bar:20}| {elapsed}, {remaining} left  {postfix}"


@contextmanager
def claim(folder: Path) -> Iterator[None]:
    """Make the folder, and keep other processes from it; for `with`.

    Raises:
        AblationError: another process is at it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with locked_folder(folder) as is_ours:
        if not is_ours:
            raise AblationError(f"{folder} is in use by another process; wait for it")
        yield


def _work(setup: Setup, variant: Variant, folder: Path, num_threads: int) -> None:
    """What the process of a run does; all that it prints goes to the run's log."""
    # Ctrl-C in a terminal reaches the whole group; the parent alone shall pass it on, once.
    os.setpgid(0, 0)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOG).open("a") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(num_threads)
    # A run whose parent was killed may be saving itself still.
    with locked_folder(folder, waits=True):
        sys.exit(report_errors(lambda: make_run(setup, variant, folder)))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)  # which saves the run


@dataclass(kw_only=True)
class Runs:
    """All runs of an ablation, some of them at once.

    Attributes:
        folder: each run's folder is in it, named as the variant.
        num_at_once: processes; they divide the threads of torch among them.
    """

    setup: Setup
    variants: Sequence[Variant]
    folder: Path
    num_at_once: int = 1
    _active: dict[Variant, SpawnProcess] = field(default_factory=dict)
    _began_s: float = 0.0
    _steps_before: int = 0

    def result(self, variant: Variant) -> Result | None:
        """What a run came to; None where it is not done."""
        return read_result(self.folder / variant.name)

    def _is_done(self, variant: Variant) -> bool:
        return is_done(self.folder / variant.name)

    def make(self) -> int:
        """Make all runs that are not done; returns 0, or 128 and the number of a signal.

        Raises:
            AblationError: a run failed; the others are saved and ended.
        """
        waiting = [variant for variant in self.variants if not self._is_done(variant)]
        self._began_s, self._steps_before = time.monotonic(), self._num_steps_done()
        with (
            StopFlag() as stop,
            tqdm(
                total=self._num_steps, initial=self._steps_before, bar_format=_BAR, disable=None
            ) as bar,
        ):
            try:
                while (waiting or self._active) and stop.signal is None:
                    while waiting and len(self._active) < self.num_at_once:
                        self._start(waiting.pop(0), bar)
                    sentinels = [process.sentinel for process in self._active.values()]
                    connection.wait(sentinels, timeout=_POLL_S)
                    self._take_ended()
                    bar.update(self._num_steps_done() - bar.n)
            finally:
                self._end()
            return 128 + stop.signal if stop.signal is not None else 0

    @property
    def _num_steps(self) -> int:
        return sum(variant.num_steps for variant in self.variants)

    def _start(self, variant: Variant, bar: tqdm[Any]) -> None:
        number = self.variants.index(variant) + 1
        tqdm.write(f"run {number} of {len(self.variants)}: {variant.name}")
        bar.set_postfix_str(f"run {number} of {len(self.variants)}")
        num_threads = max(1, torch.get_num_threads() // self.num_at_once)
        process = multiprocessing.get_context("spawn").Process(
            target=_work,
            args=(self.setup, variant, self.folder / variant.name, num_threads),
            daemon=True,
        )
        process.start()
        self._active[variant] = process

    def _take_ended(self) -> None:
        for variant, process in list(self._active.items()):
            if process.is_alive():
                continue
            del self._active[variant]
            if process.exitcode or not self._is_done(variant):
                log = self.folder / variant.name / _LOG
                raise AblationError(
                    f"{variant.name} ended with status {process.exitcode}; "
                    f"{log} ends with: {_last_line(log)}"
                )
            num_done = sum(map(self._is_done, self.variants))
            tqdm.write(f"{num_done} of {len(self.variants)} runs done{self._time_left()}")

    def _time_left(self) -> str:
        """About how long the rest takes, by the steps since the start."""
        num_done = self._num_steps_done()
        num_new = num_done - self._steps_before
        if num_new < self._num_steps / 20:
            return ""
        a_step_s = (time.monotonic() - self._began_s) / num_new
        return f", about {a_step_s * (self._num_steps - num_done) / 60:.0f} min left"

    def _num_steps_done(self) -> int:
        return sum(min(each.num_steps, self._steps_of(each)) for each in self.variants)

    def _steps_of(self, variant: Variant) -> int:
        """By the last line of the run's metrics, where it is whole."""
        file = self.folder / variant.name / "metrics.jsonl"
        if self._is_done(variant):
            return variant.num_steps
        if not file.is_file():
            return 0
        lines = file.read_bytes().split(b"\n")[:-1]
        return int(json.loads(lines[-1])["step"]) if lines else 0

    def _end(self) -> None:
        """Let what is still training save itself."""
        for process in self._active.values():
            process.terminate()
        for process in self._active.values():
            process.join()
        self._active.clear()


def _last_line(file: Path) -> str:
    lines = file.read_text(errors="replace").split("\n") if file.is_file() else []
    return next((line for line in reversed(lines) if line.strip()), "nothing")
