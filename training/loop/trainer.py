"""The training loop of pretraining and finetuning: steps, reports, validations, checkpoints."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from filelock import FileLock
from tqdm import tqdm

from albert_serve.bundle.sentence_vectors import SentenceVectors
from albert_serve.progress import progress_bar
from training.errors import RunError
from training.loop.checkpointing import Checkpoints, load_state, lock_folder, step_of
from training.loop.distributed import World
from training.loop.metrics import Meter, MetricsWriter, describe
from training.loop.step import Run, StepResult
from training.loop.validation import Validation, validate
from training.model.checkpoint import read_weights, save_checkpoint, write_tokenizer
from training.model.heads import Task
from training.model.labels import with_temperatures
from training.model.provenance import record_stage
from training.system.process import StopFlag, keep_freed_memory

_PROGRESS_BAR: Final = "{percentage:5.1f}%|{bar}| {elapsed}<{remaining} {postfix}"
_POSTFIX_EVERY_S: Final = 0.5
_ECHO_S: Final = 5.0


@dataclass(kw_only=True)
class Saver:
    """Writer of a run's checkpoints.

    Attributes:
        tokenizer: content of the tokenizer's files by name, for each checkpoint.
        every_s: seconds between checkpoints.
        program: command of the run, such as `albert-serve pretrain`.
        stage: settings and data of the run, for the checkpoints' `training.json`.
        earlier_stages: stages of the checkpoint whose weights the run started with.
        extra_config: additional keys of the checkpoints' `config.json`.
        sentence_vectors: settings of the embeddings, if the model is an embedding model.
        temperatures: temperatures of classifiers from the last validation.
    """

    checkpoints: Checkpoints
    tokenizer: Mapping[str, bytes]
    every_s: float
    program: str
    stage: Mapping[str, Any]
    earlier_stages: Sequence[Mapping[str, Any]] = ()
    extra_config: Mapping[str, Any] = field(default_factory=dict)
    sentence_vectors: SentenceVectors | None = None
    temperatures: Mapping[Task, float] = field(default_factory=dict)
    _saved_at: float = field(default_factory=time.monotonic)
    _lock: FileLock | None = None
    _validated_step: int = 0  # step of the last validation before the last checkpoint

    @property
    def is_due(self) -> bool:
        """Whether more than `every_s` seconds have passed since the last checkpoint."""
        return time.monotonic() - self._saved_at > self.every_s

    def save(self, run: Run) -> None:
        """Write a checkpoint. All processes must call this method.

        The checkpoint replaces an existing one of its step if the step was validated since then.
        """
        if run.world.is_main:
            self.checkpoints.save(
                run.progress.step,
                lambda folder: self._write(run, folder),
                run.state(),
                replaces=run.validated_step != self._validated_step,
            )
        self._validated_step = run.validated_step
        self._saved_at = time.monotonic()

    def _write(self, run: Run, folder: Path) -> None:
        save_checkpoint(
            run.model,
            folder,
            extra_config=with_temperatures(self.extra_config, self.temperatures),
            sentence_vectors=self.sentence_vectors,
        )
        write_tokenizer(self.tokenizer, run.model.config, folder)
        results = {
            "steps": run.progress.step,
            "tokens": run.num_tokens,
            "seconds": round(run.progress.seconds),
            "tasks": sorted({task for stream in run.mixture.streams for task in stream.tasks}),
        }
        record_stage(folder, self.program, {**self.stage, **results}, earlier=self.earlier_stages)

    def resume(self, run: Run) -> bool:
        """Restore the newest intact checkpoint, and return whether there is one.

        All processes must call this method. It locks the run's folder until `release` is called.
        """
        newest = self._find_newest(run.world)
        if newest is None:
            return False
        run.restore(read_weights(newest), load_state(newest))
        self._validated_step = run.validated_step
        if run.selection is not None and run.world.is_main:
            self.checkpoints.link_best(run.selection.best_step)
        return True

    def save_best(self, run: Run) -> None:
        """Write a checkpoint, and link `best` to it. All processes must call this method."""
        self.save(run)
        if run.world.is_main:
            self.checkpoints.link_best(run.progress.step)

    def _find_newest(self, world: World) -> Path | None:
        """Find the newest checkpoint in the main process, and send its step to other processes."""
        newest: Path | None = None
        if world.is_main:
            self._lock = lock_folder(self.checkpoints.folder)
            newest = self.checkpoints.newest()
        (step,) = world.sum([-1 if newest is None else step_of(newest)] if world.is_main else [0])
        if step < 0:
            return None
        newest = self.checkpoints.folder_of(int(step))
        if not newest.is_dir():
            raise RunError(
                f"Process {world.rank} cannot find {newest}. Choose an --output on a disk that all "
                "hosts share."
            )
        return newest

    def release(self) -> None:
        """Release the lock on the run's folder."""
        if self._lock is not None:
            self._lock.release()


class _Decision(NamedTuple):
    """The next action, the same in all processes: continue, save or stop."""

    done: float
    stop: int | None
    saves: bool


@dataclass(kw_only=True)
class Trainer:
    """The loop that trains a run to its end, reports metrics and saves checkpoints.

    Attributes:
        metrics: writer of metrics, or None in a process that does not write.
        report_every: number of steps per line of metrics.
        validation: held-out data and its metrics, or None to train without validation.
        validate_every: number of steps between validations.
        validates_start: whether the weights are validated before the first step.
        compiles: whether the first step compiles the model, which takes minutes.
    """

    run: Run
    saver: Saver
    metrics: MetricsWriter | None
    report_every: int
    validation: Validation | None
    validate_every: int
    validates_start: bool
    compiles: bool

    def train(self) -> int:
        """Train until the run is done or stopped by a signal, and save it.

        Returns the exit status: 0 for a complete run, 128 + the signal's number for a stopped run.
        """
        run = self.run
        if run.world.device.type == "cpu":
            keep_freed_memory()
        run.objective.train()
        run.progress.start_clock()
        # Processes may get a signal twice: from a scheduler, and from torchrun, which forwards it.
        echo_s = _ECHO_S if run.world.size > 1 else 0.0
        try:
            with (
                StopFlag(echo_s=echo_s) as stop,
                progress_bar(
                    title="training",
                    total=1.0,
                    initial=run.progress.done,
                    bar_format=_PROGRESS_BAR,
                ) as bar,
            ):
                return self._loop(stop, bar)
        except (RuntimeError, ConnectionError) as error:
            if isinstance(error, RuntimeError) and "DataLoader worker" not in str(error):
                raise
            raise RunError(
                f"A process that makes batches has ended: {error}. "
                "Repeat the command to resume from the last checkpoint."
            ) from error
        finally:
            self.saver.release()
            if self.metrics is not None:
                self.metrics.close()

    def _loop(self, stop: StopFlag, bar: tqdm[Any]) -> int:
        run, meter, shown_at = self.run, Meter(), 0.0
        if run.progress.step == 0:
            self._start(stop, bar)
        if self._is_validation_due and run.validated_step != run.progress.step:
            self._validate(stop, bar)  # a signal interrupted this validation
        while True:
            decision = self._decide(stop)
            if decision.done >= 1 or decision.stop is not None or self._stops_early:
                break
            # Weights after a skipped step are not saved: they may cause the non-finite gradients.
            if decision.saves and not run.num_skipped_in_a_row:
                self.saver.save(run)
            step = self._compile(decision.done, bar) if self.compiles else run.step(decision.done)
            meter.add(step)
            if run.num_skipped_in_a_row:
                self._print(bar, f"Skipped step {run.progress.step:,}: its gradient is not finite.")
            if run.progress.step % self.report_every == 0:
                self._report(meter, bar)
                meter, shown_at = Meter(), time.monotonic()
            if self._is_validation_due:
                self._validate(stop, bar)
            bar.update(decision.done - bar.n)
            if run.world.size == 1 and time.monotonic() - shown_at > _POSTFIX_EVERY_S:
                bar.set_postfix_str(describe(meter.metrics(run.world)), refresh=False)
                shown_at = time.monotonic()
        bar.update(decision.done - bar.n)
        stopped_by = self._validate_last(stop, bar) if decision.done >= 1 else decision.stop
        self.saver.save(run)
        if stopped_by is None:
            self._report_selection(bar, decision.done)
            return 0
        self._print(bar, f"Stopped at {decision.done:.1%}. Repeat the command to resume.")
        return 128 + stopped_by

    def _compile(self, done: float, bar: tqdm[Any]) -> StepResult:
        """Train the first step, which compiles the model, while the bar's clock continues."""
        self.compiles, started, is_done = False, time.monotonic(), threading.Event()
        self._print(
            bar, "Compiling the model, which takes minutes. --no-compile starts immediately."
        )

        def tick() -> None:
            # A disabled bar has no `mininterval`.
            while not (bar.disable or is_done.wait(max(1.0, bar.mininterval))):
                bar.set_postfix_str("compiling")

        clock = threading.Thread(target=tick, daemon=True)
        clock.start()
        try:
            step = self.run.step(done)
        finally:
            is_done.set()
            clock.join()
        self._print(
            bar, f"Compiled and trained the first step in {time.monotonic() - started:.0f} s."
        )
        return step

    def _start(self, stop: StopFlag, bar: tqdm[Any]) -> None:
        """Save the initial weights, after validating them once if they may be the best."""
        selection = self.run.selection
        if self.validates_start and selection is not None and selection.best_step is None:
            self._validate(stop, bar)
        self.saver.save(self.run)

    def _decide(self, stop: StopFlag) -> _Decision:
        """Decide the next action by the main process' clock and any process' signal."""
        run = self.run
        done, saves = run.progress.done, self.saver.is_due
        if run.world.size == 1:
            return _Decision(done, stop.signal, saves)
        is_main = run.world.is_main
        done, num_saves, num_stops = run.world.sum(
            [done * is_main, saves and is_main, stop.signal is not None]
        )
        number = (stop.signal or signal.SIGTERM) if num_stops else None
        return _Decision(done, number, bool(num_saves))

    def _report(self, meter: Meter, bar: tqdm[Any]) -> None:
        run = self.run
        metrics = meter.metrics(run.world) | run.optimizers.metrics()
        if run.num_skipped:
            metrics["skipped"] = run.num_skipped
        bar.set_postfix_str(describe(metrics), refresh=False)
        self._write(metrics)

    @property
    def _is_validation_due(self) -> bool:
        step = self.run.progress.step
        is_due = self.validation is not None and step % self.validate_every == 0
        # Weights after a skipped step are not saved (see `_loop`).
        return is_due and not self.run.num_skipped_in_a_row

    def _validate_last(self, stop: StopFlag, bar: tqdm[Any]) -> int | None:
        """Validate the final weights, unless their step was already validated.

        Returns the number of a signal that interrupted the validation. Patience does not count this
        validation: otherwise, an extended run would stop earlier.
        """
        run = self.run
        if self.validation is None or run.progress.step in (0, run.validated_step):
            return None
        metrics = self._measure(stop, bar)
        if metrics is None:
            return stop.signal
        if run.selection is not None and run.selection.update_best(run.progress.step, metrics):
            self.saver.save_best(run)
        return None

    def _validate(self, stop: StopFlag, bar: tqdm[Any]) -> None:
        """Validate the weights, and save them if they are the best so far."""
        run = self.run
        metrics = self._measure(stop, bar)
        if metrics and run.selection and run.selection.update(run.progress.step, metrics):
            self.saver.save_best(run)

    def _measure(self, stop: StopFlag, bar: tqdm[Any]) -> Mapping[str, float] | None:
        """Report metrics of held-out data; return those that select, or None if interrupted."""
        run, validation = self.run, self.validation
        assert validation is not None
        by_task = validate(run, validation, should_stop=lambda: stop.signal is not None)
        if by_task is None:
            return None
        metrics: dict[str, float] = {}
        for task, task_metrics in by_task.items():
            metrics |= {f"validation/{task}/{name}": value for name, value in task_metrics.items()}
            values = ", ".join(f"{name} {value:.4f}" for name, value in task_metrics.items())
            self._print(bar, f"Step {run.progress.step:,}, validation of {task}: {values}.")
        self._write(metrics)
        self.saver.temperatures = {
            task: task_metrics["temperature"]
            for task, task_metrics in by_task.items()
            if "temperature" in task_metrics
        }
        run.validated_step = run.progress.step
        return validation.selection_metrics(by_task)

    @property
    def _stops_early(self) -> bool:
        return self.run.selection is not None and self.run.selection.stops_early

    def _report_selection(self, bar: tqdm[Any], done: float) -> None:
        """Report the best validation at the end of a run, and whether the run stopped early."""
        if self.run.selection is not None and (self.run.progress.step or self.validates_start):
            for line in self.run.selection.report(done, self.saver.checkpoints.folder / "best"):
                self._print(bar, line)

    def _write(self, metrics: Mapping[str, float]) -> None:
        if self.metrics is not None:
            run = self.run
            self.metrics.write(
                step=run.progress.step,
                tokens=run.num_tokens,
                elapsed_s=run.progress.seconds,
                **metrics,
            )

    def _print(self, bar: tqdm[Any], message: str) -> None:
        if self.run.world.is_main:
            bar.write(message)
