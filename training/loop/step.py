"""A model in training: one optimizer step, and the state to resume from.

A step depends on the seed, the step's number and the saved state alone, so that a resumed run and
an uninterrupted one end with the same weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils import deterministic

from training.data.batch import LossName, MicroBatch
from training.data.streams import TaskStream
from training.errors import RunError
from training.loop.distributed import World, accumulating
from training.loop.early_stopping import BestValidation
from training.loop.progress import Progress
from training.losses import LossSums, Tally
from training.model.heads import AlbertForTasks
from training.model.hf_names import parameters
from training.optim.optimizers import Optimizers, Schedule
from training.system.precision import PrecisionName, precision

_STATE_VERSION: Final = 2
# Steps in a row without a finite gradient after which a run ends.
_MAX_SKIPPED: Final = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """The result of one optimizer step.

    Attributes:
        tallies: of this process' micro-batches.
        num_tokens: real tokens in its micro-batches, over all processes.
        grad_norm: norm of the gradient before clipping; if it is not finite, the step was skipped.
        lr_factor: learning-rate multiplier on the peak rates.
    """

    tallies: Mapping[LossName, Tally]
    num_tokens: int
    grad_norm: float
    lr_factor: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """The task streams of a run, and how they are mixed.

    Attributes:
        weights: relative frequency of each task stream, in the order of `streams`.
        loss_weights: by the loss' name; 1 where it is missing. Sentence order has one label a
            sequence: in small batches its gradient is mostly noise and drowns the others'.
    """

    streams: Sequence[TaskStream]
    weights: Sequence[float]
    loss_weights: Mapping[LossName, float]

    def draw(self, rng: np.random.Generator) -> TaskStream:
        """Draw the task stream of a step."""
        odds = np.asarray(self.weights) / sum(self.weights)
        return self.streams[int(rng.choice(len(self.streams), p=odds))]


@dataclass(kw_only=True)
class Run:
    """A model in training, with its task streams, optimizers and progress.

    Attributes:
        objective: the model and its losses, wrapped by `replicate`.
        precision: of matrix products, in training and validation.
        num_steps: steps so far, by the task stream's name.
        num_tokens: real tokens trained on so far.
        validated_step: step of the last validation.
        num_skipped: steps so far whose gradient was not finite.
        num_skipped_in_a_row: those since the last step with a finite one; none of those that are
            put down to the loss scale.
        scaler: scales the loss in fp16 (arXiv 1710.03740, section 3.2).
        selection: the best validation so far; None if none is to be kept.
        earlier_selection: the state of a selection that this run was resumed without.
    """

    model: AlbertForTasks
    objective: nn.Module
    optimizers: Optimizers
    schedule: Schedule
    mixture: Mixture
    clip_norm: float
    seed: int
    world: World
    progress: Progress
    precision: PrecisionName
    num_steps: Counter[str] = field(default_factory=Counter)
    num_tokens: int = 0
    validated_step: int = 0
    num_skipped: int = 0
    num_skipped_in_a_row: int = 0
    selection: BestValidation | None = None
    earlier_selection: Mapping[str, Any] = field(default_factory=dict)
    scaler: GradScaler = field(init=False)

    def __post_init__(self) -> None:
        self.scaler = GradScaler(self.world.device.type, enabled=self.precision == "fp16")

    def step(self, done: float) -> StepResult:
        """Train one step on a task stream drawn at random; `done` is the run's progress before it.

        A gradient that is not finite leaves the weights as they are.
        """
        stream = self.mixture.draw(np.random.default_rng([self.seed, self.progress.step]))
        try:
            with reproducible(self.world.device):
                tallies, num_tokens = self._gradient(stream)
                norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
                grad_norm = float(norm)
                factor = self._update(grad_norm, done)
        except torch.OutOfMemoryError as error:
            reason = str(error).split(". ")[0]
            raise RunError(
                f"{reason}. Give a smaller --micro-batch-size, a shorter --length, or "
                "--recompute in pretraining"
            ) from error
        self.num_steps[stream.name] += 1
        self.num_tokens += num_tokens
        return StepResult(
            tallies=tallies, num_tokens=num_tokens, grad_norm=grad_norm, lr_factor=factor
        )

    def _gradient(self, stream: TaskStream) -> tuple[dict[LossName, Tally], int]:
        """Compute the gradient of the stream's next step; return its tallies and real tokens."""
        batches = list(stream.step())
        *counts, num_tokens = self.world.sum(
            [sum(batch.counts[name] for batch in batches) for name in stream.losses]
            + [sum(batch.num_tokens for batch in batches)]
        )
        tallies = self._accumulate(batches, dict(zip(stream.losses, counts, strict=True)))
        for optimizer in self.optimizers.parts:
            self.scaler.unscale_(optimizer)
        return tallies, int(num_tokens)

    def _accumulate(
        self, batches: Sequence[MicroBatch], totals: Mapping[LossName, float]
    ) -> dict[LossName, Tally]:
        """Accumulate the gradient over the micro-batches; return their tallies."""
        tallies: dict[LossName, Tally] = {name: Tally() for name in totals}
        for number, batch in enumerate(batches):
            self._seed_dropout(number)
            with accumulating(self.objective, is_last=number == len(batches) - 1):
                with precision(self.world.device, self.precision):
                    losses = self.objective(batch)
                scaled = self.scaler.scale(self._loss(losses, totals))
                scaled.backward()  # type: ignore[no-untyped-call]
            for name, tally in tallies.items():
                tally.add(losses[name])
        return tallies

    def _seed_dropout(self, number: int) -> None:
        """Seed dropout for the micro-batch of that number, so that no random state is saved."""
        position = [self.seed, self.progress.step, self.world.rank, number]
        torch.manual_seed(int(np.random.SeedSequence(position).generate_state(1, np.uint64)[0]))

    def _loss(
        self, losses: Mapping[LossName, LossSums], totals: Mapping[LossName, float]
    ) -> Tensor:
        """Return a micro-batch's share of the step's loss, the mean over all its predictions.

        The factor `world.size` undoes the averaging of gradients over processes. A head that the
        batch has no label for has a loss of 0.
        """
        parts = [
            self.mixture.loss_weights.get(name, 1.0)
            * self.world.size
            / max(totals.get(name, 0), 1)
            * sums.loss
            for name, sums in losses.items()
        ]
        return torch.stack(parts).sum()

    def _update(self, grad_norm: float, done: float) -> float:
        """Update the weights if the gradient is finite; return the learning-rate multiplier."""
        factor = self.schedule.factor(done)
        self.progress.step += 1
        scale = self.scaler.get_scale()
        self.scaler.update()
        if np.isfinite(grad_norm):
            self.optimizers.step(factor)
            self.num_skipped_in_a_row = 0
            return factor
        self.optimizers.zero_grad()
        self.num_skipped += 1
        if scale > 1 and self.scaler.get_scale() < scale:  # it may have been too large
            return factor
        self.num_skipped_in_a_row += 1
        if self.num_skipped_in_a_row == _MAX_SKIPPED:
            raise RunError(
                f"the gradient was not finite for {_MAX_SKIPPED} steps in a row; start a new run "
                "with lower rates, from the last checkpoint by --initialize-from"
            )
        return factor

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`, without the weights."""
        selected = self.earlier_selection if self.selection is None else self.selection.state()
        return {
            "version": _STATE_VERSION,
            "optimizers": self.optimizers.state_dict(),
            "step": self.progress.step,
            "elapsed_s": self.progress.seconds,
            "tokens": self.num_tokens,
            "num_steps": dict(self.num_steps),
            "feeds": {stream.name: stream.state() for stream in self.mixture.streams},
            "stability": {
                "num_skipped": self.num_skipped,
                "num_in_a_row": self.num_skipped_in_a_row,
                "scaler": self.scaler.state_dict(),
            },
            "validated_step": self.validated_step,
            **({"selection": dict(selected)} if selected else {}),
        }

    def restore(self, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Restore a saved state, and the weights by Hugging Face name that were saved with it."""
        if state.get("version") != _STATE_VERSION:
            raise RunError("the run is an earlier version's; give another --output")
        own = parameters(self.model)
        if others := sorted(own.keys() ^ weights.keys()):
            has = "has" if others[0] in weights else "has no"
            raise RunError(
                f"the run was started with other options: its model {has} {others[0]}; "
                "resume it with the same, or give another --output"
            )
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(weights[name])
        self.optimizers.load_state_dict(state["optimizers"])
        self.progress.restore(step=state["step"], elapsed_s=state["elapsed_s"])
        self.num_tokens = state["tokens"]
        self.num_steps = Counter(state["num_steps"])
        self.num_skipped = state["stability"]["num_skipped"]
        self.num_skipped_in_a_row = state["stability"]["num_in_a_row"]
        if scaler := state["stability"].get("scaler"):
            self.scaler.load_state_dict(scaler)
        selected = state.get("selection", {})
        if self.selection is None:
            self.earlier_selection = selected
        else:
            self.selection.restore(selected)
        self.validated_step = state["validated_step"]
        for stream in self.mixture.streams:
            stream.restore(state["feeds"][stream.name])


@contextmanager
def reproducible(device: torch.device) -> Iterator[None]:
    """Use torch's deterministic algorithms on a CPU; for `with`. A GPU's are left as they are.

    The gradients of embeddings and of gathered rows are sums by index. Compiled by inductor,
    threads add to them atomically, in the order in which they arrive, so that the rounding differs
    from run to run. The deterministic sum takes the rows in their order, and less time, since no
    thread waits for another (docs/decisions.md). With the same number of threads, all other
    operations of a step are reproducible in any case.
    """
    if device.type != "cpu":
        yield
        return
    is_enabled = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    # Filling reveals reads of uninitialised memory; it would write each result twice.
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(is_enabled, warn_only=only_warns)
        deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
