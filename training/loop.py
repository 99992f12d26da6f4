"""The loop of pretraining and finetuning: draw a task, make a step, report, save.

What a step computes follows from the seed, the step's number and the saved state alone, so that
a run that was stopped and one that was not end with the same weights.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from tqdm import tqdm

from training.checkpoint import save_checkpoint
from training.feeds import Feed
from training.heads import AlbertForTasks, Task
from training.losses import Score, Tally, precision
from training.optim import Optimizers, Schedule
from training.provenance import record_stage
from training.run import MetricsFile, Progress, RunError, StopFlag, load_state, save_state

_PROGRESS_BAR: Final = "{percentage:5.1f}%|{bar}| {elapsed}<{remaining} {postfix}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What one step did.

    Attributes:
        num_tokens: real tokens in its batch.
        grad_norm: norm of the gradient before it was clipped.
        lr_factor: the part of the peak rates that it was made at.
    """

    scores: Mapping[Task, Score]
    num_tokens: int
    grad_norm: float
    lr_factor: float


@dataclass(kw_only=True)
class Run:
    """A model in training, and how far it is.

    Attributes:
        weights: how often each feed is drawn, in the order of `feeds`.
        loss_weights: by task, where a loss does not count as 1. Sentence order has one label a
            sequence: in small batches its gradient is mostly noise and drowns the others'.
        num_batches: batches taken so far, by the feed's name.
        num_tokens: real tokens trained on so far.
    """

    model: AlbertForTasks
    optimizers: Optimizers
    schedule: Schedule
    feeds: Sequence[Feed]
    weights: Sequence[float]
    loss_weights: Mapping[Task, float]
    clip_norm: float
    seed: int
    device: torch.device
    progress: Progress
    num_batches: Counter[str] = field(default_factory=Counter)
    num_tokens: int = 0

    def step(self) -> Step:
        """One update on the task that is drawn for this step.

        Raises:
            RunError: the gradient is not finite; the weights are left as they were.
        """
        feed = self._draw()
        with precision(self.device):
            scored = next(feed.scorers)(self.model, self.device)
        losses = [
            self.loss_weights.get(task, 1.0) * score.mean_loss
            for task, score in scored.scores.items()
        ]
        loss = torch.stack(losses).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm).item()
        if not np.isfinite(norm):
            raise RunError(
                f"the gradient of step {self.progress.step:,} has norm {norm}; "
                "start again with lower rates, the last checkpoint is whole"
            )
        factor = self.schedule.factor(self.progress.done)
        self.optimizers.step(factor)
        self.progress.step += 1
        self.num_batches[feed.name] += 1
        self.num_tokens += scored.num_tokens
        return Step(
            scores=scored.scores, num_tokens=scored.num_tokens, grad_norm=norm, lr_factor=factor
        )

    def _draw(self) -> Feed:
        odds = np.asarray(self.weights) / sum(self.weights)
        rng = np.random.default_rng([self.seed, self.progress.step])
        return self.feeds[int(rng.choice(len(self.feeds), p=odds))]

    def state(self) -> dict[str, Any]:
        """What `restore` needs to go on."""
        return {
            "model": self.model.state_dict(),
            "optimizers": self.optimizers.state_dict(),
            "step": self.progress.step,
            "elapsed_s": self.progress.seconds,
            "tokens": self.num_tokens,
            "num_batches": dict(self.num_batches),
            "random": _random_state(self.device),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; feeds must stand at their beginning.

        A state of a run with a single feed may lack `num_batches` and `random`, as early ones do.
        """
        self.model.load_state_dict(state["model"])
        self.optimizers.load_state_dict(state["optimizers"])
        self.progress.step = state["step"]
        self.progress.elapsed_s = state["elapsed_s"]
        self.num_tokens = state["tokens"]
        self.num_batches = Counter(state.get("num_batches", {self.feeds[0].name: state["step"]}))
        for feed in self.feeds:
            num_taken = self.num_batches[feed.name]
            next(islice(feed.scorers, num_taken, num_taken), None)
        if "random" in state:
            _set_random_state(state["random"], self.device)


@dataclass(kw_only=True)
class Saver:
    """Writes a run's checkpoint and state into its folder.

    Attributes:
        program: what trains, such as `training.pretrain`.
        stage: the settings and data of this run, for the checkpoint's `training.json`.
        initialized_from: the checkpoint that the run started from, if it did.
        extra_config: further keys of the checkpoint's `config.json`.
    """

    folder: Path
    tokenizer_from: Path
    every_s: float
    program: str
    stage: Mapping[str, Any]
    initialized_from: Path | None = None
    extra_config: Mapping[str, Any] = field(default_factory=dict)
    _saved_at: float = field(default_factory=time.monotonic)

    def save_if_due(self, run: Run) -> None:
        """Write when `every_s` seconds have gone since the last time."""
        if time.monotonic() - self._saved_at > self.every_s:
            self.save(run)

    def save(self, run: Run) -> None:
        """Write."""
        save_checkpoint(
            run.model,
            self.folder / "checkpoint",
            tokenizer_from=self.tokenizer_from,
            extra_config=self.extra_config,
        )
        done = {
            "steps": run.progress.step,
            "tokens": run.num_tokens,
            "seconds": round(run.progress.seconds),
        }
        record_stage(
            self.folder / "checkpoint",
            self.program,
            {**self.stage, **done},
            earlier=self.initialized_from,
        )
        save_state(self.folder / "state.pt", run.state())
        self._saved_at = time.monotonic()


class Meter:
    """Means since the last report."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._tallies: dict[Task, Tally] = {}
        self._num_steps = self._num_tokens = 0
        self._norms = self._factor = 0.0

    def add(self, step: Step) -> None:
        """Take one step in."""
        for task, score in step.scores.items():
            self._tallies.setdefault(task, Tally()).add(score)
        self._num_steps += 1
        self._num_tokens += step.num_tokens
        self._norms += step.grad_norm
        self._factor = step.lr_factor

    def figures(self) -> dict[str, float]:
        """Loss and accuracy of each task that was trained, gradient norm, rate and speed."""
        counted = {task: tally for task, tally in self._tallies.items() if tally.count}
        return {
            **{f"{task}/loss": tally.loss for task, tally in counted.items()},
            **{f"{task}/accuracy": tally.accuracy for task, tally in counted.items()},
            "grad_norm": self._norms / self._num_steps,
            "lr_factor": self._factor,
            "tokens_per_s": self._speed,
        }

    @property
    def _speed(self) -> float:
        return self._num_tokens / max(time.monotonic() - self._started, 1e-9)

    def __str__(self) -> str:
        tasks = [f"{task} {tally}" for task, tally in self._tallies.items()]
        return ", ".join([*tasks, f"{self._speed:,.0f} tokens/s"])


def go_on(run: Run, folder: Path) -> None:
    """Restore what the folder's state holds, if there is one.

    Raises:
        RunError: the state cannot be read.
    """
    state = load_state(folder / "state.pt")
    if state is not None:
        run.restore(state)
        print(f"going on from step {run.progress.step:,}")


def train(run: Run, saver: Saver, *, report_every: int) -> int:
    """Train until the run is done or stopped by a signal, and save it.

    Returns the exit status: 0 for a run that is done, 128 + the signal's number for one that was
    stopped, so that no script takes it for done.
    """
    metrics, meter = MetricsFile(saver.folder / "metrics.jsonl", step=run.progress.step), Meter()
    run.model.train()
    run.progress.start_clock()
    with (
        StopFlag() as stop,
        tqdm(total=1.0, initial=run.progress.done, disable=None, bar_format=_PROGRESS_BAR) as bar,
    ):
        while run.progress.done < 1 and stop.signal is None:
            meter.add(run.step())
            bar.set_postfix_str(str(meter), refresh=False)
            bar.update(run.progress.done - bar.n)
            if run.progress.step % report_every == 0:
                metrics.write(step=run.progress.step, tokens=run.num_tokens, **meter.figures())
                meter = Meter()
            saver.save_if_due(run)
        saver.save(run)
    if run.progress.done < 1 and stop.signal is not None:
        print(f"stopped at {run.progress.done:.1%}; the same command goes on")
        return 128 + stop.signal
    return 0


def _random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """The generators that dropout draws from."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _set_random_state(states: Mapping[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
