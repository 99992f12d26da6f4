"""A model in training: one optimizer step, and the state to resume from.

A step depends only on the seed, the step's number and the saved state, so a resumed run ends with
the same weights as an uninterrupted run.
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
# Number of consecutive steps without a finite gradient after which a run ends.
_MAX_SKIPPED: Final = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """The result of one optimizer step.

    Attributes:
        tallies: losses of this process' micro-batches.
        num_tokens: number of real tokens in the micro-batches of all processes.
        grad_norm: norm of the gradient before clipping. If it is not finite, the step was skipped.
        lr_factor: multiplier on the peak learning rates.
    """

    tallies: Mapping[LossName, Tally]
    num_tokens: int
    grad_norm: float
    lr_factor: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """The task streams of a run, and the proportions in which they are mixed.

    Attributes:
        weights: relative frequency of each task stream, in the order of `streams`.
        loss_weights: weight of each loss by name (default: 1). Sentence order has one label per
            sequence: in small batches, its gradient is mostly noise that hides the other gradients.
    """

    streams: Sequence[TaskStream]
    weights: Sequence[float]
    loss_weights: Mapping[LossName, float]

    def draw(self, rng: np.random.Generator) -> TaskStream:
        """Draw the task stream of a step."""
        probabilities = np.asarray(self.weights) / sum(self.weights)
        return self.streams[int(rng.choice(len(self.streams), p=probabilities))]


@dataclass(kw_only=True)
class Run:
    """A model in training, with its task streams, optimizers and progress.

    Attributes:
        objective: model and losses, wrapped by `replicate`.
        precision: precision of matrix products, in training and validation.
        num_steps: number of steps so far, by task stream.
        num_tokens: number of real tokens so far.
        validated_step: step of the last validation.
        num_skipped: number of steps so far whose gradient was not finite.
        num_skipped_in_a_row: number of skipped steps since the last finite gradient, not counting
            steps whose loss scale may have been too large.
        scaler: loss scaler for fp16 (arXiv 1710.03740, section 3.2).
        selection: best validation so far, or None if the run does not select a checkpoint.
        earlier_selection: saved state of a selection, if this run was resumed without one.
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
        """Train one step on a task stream that is drawn at random.

        If the gradient is not finite, the weights stay unchanged.

        Args:
            done: completed fraction of the run before the step.
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
                f"{reason}. Set a smaller --micro-batch-size, a shorter --length, or --recompute "
                "in pretraining."
            ) from error
        self.num_steps[stream.name] += 1
        self.num_tokens += num_tokens
        return StepResult(
            tallies=tallies, num_tokens=num_tokens, grad_norm=grad_norm, lr_factor=factor
        )

    def _gradient(self, stream: TaskStream) -> tuple[dict[LossName, Tally], int]:
        """Compute the gradient of the stream's next step; return tallies and a real-token count."""
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
        """Seed dropout for micro-batch `number`, so that no random state needs to be saved."""
        entropy = [self.seed, self.progress.step, self.world.rank, number]
        torch.manual_seed(int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]))

    def _loss(
        self, losses: Mapping[LossName, LossSums], totals: Mapping[LossName, float]
    ) -> Tensor:
        """Return a micro-batch's part of the step's loss, the mean over the step's predictions.

        The factor `world.size` cancels the averaging of gradients over processes. A head without
        labels in the batch has a loss of 0.
        """
        weighted_losses = [
            self.mixture.loss_weights.get(name, 1.0)
            * self.world.size
            / max(totals.get(name, 0), 1)
            * sums.loss
            for name, sums in losses.items()
        ]
        return torch.stack(weighted_losses).sum()

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
        if scale > 1 and self.scaler.get_scale() < scale:  # the reduced scale may help
            return factor
        self.num_skipped_in_a_row += 1
        if self.num_skipped_in_a_row == _MAX_SKIPPED:
            raise RunError(
                f"The gradient was not finite in {_MAX_SKIPPED} consecutive steps. Start a new run "
                "from the last checkpoint (--initialize-from) with lower learning rates."
            )
        return factor

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`, without the weights."""
        selection = self.earlier_selection if self.selection is None else self.selection.state()
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
            **({"selection": dict(selection)} if selection else {}),
        }

    def restore(self, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Restore a saved state, and the weights of its checkpoint by Hugging Face name."""
        if state.get("version") != _STATE_VERSION:
            raise RunError(
                "Another version of albert-serve started this run. Choose another --output."
            )
        parameter_by_name = parameters(self.model)
        if differing := sorted(parameter_by_name.keys() ^ weights.keys()):
            has = "has" if differing[0] in weights else "has no"
            raise RunError(
                f"The run was started with other options: its model {has} {differing[0]}. "
                "Resume it with the same options, or choose another --output."
            )
        with torch.no_grad():
            for name, parameter in parameter_by_name.items():
                parameter.copy_(weights[name])
        self.optimizers.load_state_dict(state["optimizers"])
        self.progress.restore(step=state["step"], elapsed_s=state["elapsed_s"])
        self.num_tokens = state["tokens"]
        self.num_steps = Counter(state["num_steps"])
        self.num_skipped = state["stability"]["num_skipped"]
        self.num_skipped_in_a_row = state["stability"]["num_in_a_row"]
        if scaler := state["stability"].get("scaler"):
            self.scaler.load_state_dict(scaler)
        selection = state.get("selection", {})
        if self.selection is None:
            self.earlier_selection = selection
        else:
            self.selection.restore(selection)
        self.validated_step = state["validated_step"]
        for stream in self.mixture.streams:
            stream.restore(state["feeds"][stream.name])


@contextmanager
def reproducible(device: torch.device) -> Iterator[None]:
    """Use torch's deterministic algorithms on a CPU within `with`. On a GPU, change nothing.

    The gradients of embeddings and of gathered rows are sums by index. In code compiled by
    inductor, threads add to them atomically, in the order in which they arrive, so the rounding
    differs from run to run. The deterministic sum adds rows in order and costs up to 1.8 % of a
    step (docs/decisions.md). All other operations of a step are reproducible with the same number
    of threads.
    """
    if device.type != "cpu":
        yield
        return
    is_enabled = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    fills_memory = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    # Filling reveals reads of uninitialised memory, but writes each result twice.
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(is_enabled, warn_only=only_warns)
        deterministic.fill_uninitialized_memory = fills_memory  # type: ignore[attr-defined]
