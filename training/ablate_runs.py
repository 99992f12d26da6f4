"""The runs of an ablation: each a pretraining of its own folder and process, then measured.

A run that was stopped goes on, and one that has its `figures.json` is not repeated.
"""

from __future__ import annotations

import fcntl
import io
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing import connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from tqdm import tqdm

from albert_serve.tokenizer import AlbertTokenizer
from training import pretrain
from training.ablate_measure import Texts, measure_variant
from training.ablate_tables import Variant
from training.checkpoint import load_checkpoint, write_atomically
from training.errors import TrainingError, report_errors
from training.masking import NgramMasking, word_starts
from training.run import StopFlag
from training.shards import Shards

_FIGURES: Final = "figures.json"
_PREDICTIONS: Final = "predictions.npz"
_LOG: Final = "log.txt"
_POLL_S: Final = 0.5
_REPORTS_A_RUN: Final = 50
_BAR: Final = "{percentage:3.0f}%|{bar:20}| {elapsed}, {remaining} left  {postfix}"


class AblationError(TrainingError):
    """An ablation that cannot start or go on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What all runs of an ablation have in common; sizes are those of `training.pretrain`.

    Attributes:
        shards: folder of the corpus that is trained on.
        validation: folder of the held-out one.
        tokenizer: folder of the vocabulary that both were made with.
        sentence_weight: of the sentence task's loss.
        held_out_tokens: held-out text of each form that a model is measured on, and training
            text of each form that a probe is trained on.
    """

    shards: Path
    validation: Path
    tokenizer: Path
    hidden_size: int
    num_layers: int
    num_heads: int
    length: int
    batch_size: int
    sentence_weight: float
    held_out_tokens: int
    compiles: bool
    device: torch.device

    def settings(self) -> dict[str, Any]:
        """All that the figures follow from but the variant, as JSON has it.

        Raises:
            ShardError: a corpus cannot be read, or was made with another tokenizer.
        """
        found = asdict(self)
        for name in ("tokenizer", "device", "compiles"):
            del found[name]
        tokenizer = self.tokenizer / "tokenizer.json"
        for name in ("shards", "validation"):
            found[name] = Shards.open(found[name], tokenizer).fingerprint
        return found

    def arguments(self, variant: Variant, folder: Path) -> list[str]:
        """The command line of `training.pretrain` for a variant."""
        return [
            *("--shards", str(self.shards), "--tokenizer", str(self.tokenizer)),
            *("--output", str(folder), "--preset", "small", "--recipe", "small"),
            *("--hidden-size", str(self.hidden_size), "--layers", str(self.num_layers)),
            *("--heads", str(self.num_heads), "--max-positions", str(self.length)),
            *("--length", str(self.length), "--batch-size", str(self.batch_size)),
            *("--sentence-weight", str(self.sentence_weight), "--steps", str(variant.num_steps)),
            *("--embedding-size", str(variant.embedding_size), "--sharing", variant.sharing),
            *("--sentence-task", variant.sentence_task, "--seed", str(variant.seed)),
            *("--device", str(self.device), "--keep", "1", "--save-every", "2m"),
            *("--report-every", str(_report_every(variant.num_steps))),
            "--compile" if self.compiles else "--no-compile",
        ]

    def texts(self) -> Texts:
        """What models are measured on."""
        tokenizer = AlbertTokenizer.from_file(self.tokenizer / "tokenizer.json")
        return Texts(
            training=Shards.open(self.shards, self.tokenizer / "tokenizer.json"),
            held_out=Shards.open(self.validation, self.tokenizer / "tokenizer.json"),
            masking=NgramMasking(word_starts=word_starts(tokenizer)),
            length=self.length,
            num_tokens=self.held_out_tokens,
        )


def _report_every(num_steps: int) -> int:
    """So that the last step is reported too."""
    most = max(1, num_steps // _REPORTS_A_RUN)
    return max(size for size in range(1, most + 1) if num_steps % size == 0)


def read_figures(folder: Path) -> dict[str, Any] | None:
    """The figures of a run; None where it is not done.

    Raises:
        AblationError: the file is damaged.
    """
    file = folder / _FIGURES
    if not file.is_file():
        return None
    try:
        found = json.loads(file.read_bytes())
    except ValueError as error:
        raise AblationError(f"{file} is not JSON: {error}; delete it to measure again") from error
    if not isinstance(found, dict) or "masked_loss" not in found:
        raise AblationError(f"{file} holds no figures of a run; delete it to measure again")
    return found


def make_run(setup: Setup, variant: Variant, folder: Path) -> int:
    """Pretrain one model, or go on with it, and measure it; returns the exit status.

    Raises:
        TrainingError: it cannot be trained or measured.
    """
    status = pretrain.main(setup.arguments(variant, folder))
    if status:
        return status
    model = load_checkpoint(folder / "checkpoint").to(setup.device)
    measured = measure_variant(model, variant.sentence_task, setup.texts(), setup.device)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    record = {
        "variant": asdict(variant),
        "tokens": last["tokens"],
        "training_s": last["elapsed_s"],
        **measured.figures(),
    }
    predictions = io.BytesIO()
    np.savez_compressed(predictions, **measured.predictions)  # type: ignore[arg-type]
    write_atomically(folder / _PREDICTIONS, predictions.getvalue())
    write_atomically(folder / _FIGURES, (json.dumps(record, indent=2) + "\n").encode())
    return 0


@contextmanager
def claim(folder: Path) -> Iterator[None]:
    """Make the folder, and keep other processes from it; for `with`.

    Raises:
        AblationError: another process is at it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise AblationError(f"{folder} is in use by another process; wait for it") from error
    finally:
        os.close(descriptor)


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
    with _waiting_for(folder):
        sys.exit(report_errors(lambda: make_run(setup, variant, folder)))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)  # which saves the run


@contextmanager
def _waiting_for(folder: Path) -> Iterator[None]:
    """A run whose parent was killed may be saving itself still."""
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(descriptor)


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

    def figures(self, variant: Variant) -> dict[str, Any] | None:
        """A run's figures; None where it is not done."""
        return read_figures(self.folder / variant.name)

    def make(self) -> int:
        """Make all runs that are not done; returns 0, or 128 and the number of a signal.

        Raises:
            AblationError: a run failed; the others are saved and ended.
        """
        waiting = [variant for variant in self.variants if self.figures(variant) is None]
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
            if process.exitcode or self.figures(variant) is None:
                log = self.folder / variant.name / _LOG
                raise AblationError(
                    f"{variant.name} ended with status {process.exitcode}; "
                    f"{log} ends with: {_last_line(log)}"
                )
            num_done = sum(self.figures(each) is not None for each in self.variants)
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
        if self.figures(variant) is not None:
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
