"""A training run of a stub task in this process, with scripted events and validations."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import torch

from albert_serve.config import AlbertConfig
from tests.training.support import TINY, our_model
from training.data.batch import ExampleBatch
from training.loop.distributed import World
from training.loop.driver import PreparedRun, TrainedRun, build_run, train_run
from training.loop.early_stopping import BestValidation
from training.loop.progress import Progress
from training.loop.step import Mixture
from training.loop.validation import Validation
from training.losses import LossSums, cls_logits, cross_entropy
from training.model.albert import ModelInputs
from training.model.heads import AlbertForTasks
from training.optim.optimizers import Hyperparameters
from training.options.config import RunFolder
from training.system.precision import PrecisionName

TASK: Final = "text-classification"
CONFIG: Final = replace(TINY, num_layers=1, hidden_dropout=0.1, attention_dropout=0.1)
HYPERPARAMETERS: Final = Hyperparameters(
    optimizer="adamw", lr=1e-2, pooled_factor=1.0, schedule="wsd", warmup=0.0, decay=0.5,
    sentence_weight=1.0, clip_norm=1.0,
)  # fmt: skip
NEVER_S: Final = 1e9


class Killed(BaseException):
    """An exception that ends a run without a checkpoint, as a kill does."""


def kill() -> None:
    raise Killed


@dataclass(kw_only=True)
class Stub:
    """A task stream and its validation. A step has 8 examples of 8 tokens, and takes 0.5 s.

    Attributes:
        before: actions before the gradient of a step, by step, counted from 1.
        in_validation: actions in the validation after a step, by step.
        spoiled: steps whose gradient is not finite.
        accuracies: validation metric by step (default: 0.5).
        now_s: time on the run's clock. It starts after the real time at which the run's `Saver` is
            created.
    """

    before: Mapping[int, Callable[[], object]] = field(default_factory=dict)
    in_validation: Mapping[int, Callable[[], object]] = field(default_factory=dict)
    spoiled: Container[int] = ()
    accuracies: Mapping[int, float] = field(default_factory=dict)
    name: str = "stub"
    task: str = TASK
    tasks: tuple[str, ...] = (TASK,)
    losses: tuple[str, ...] = (TASK,)
    num_taken: int = 0
    now_s: float = field(default_factory=lambda: math.ceil(time.monotonic()) + 60.0)

    def step(self) -> Sequence[ExampleBatch]:
        self.num_taken += 1
        self.before.get(self.num_taken, lambda: None)()
        self.now_s += 0.5
        generator = torch.Generator().manual_seed(self.num_taken)
        ids_BS = torch.randint(5, 50, (8, 8), generator=generator)
        return [micro_batch(ids_BS[:3]), micro_batch(ids_BS[3:])]

    def state(self) -> list[int]:
        return [self.num_taken]

    def restore(self, state: Sequence[int]) -> None:
        (self.num_taken,) = state

    def loss(self, model: AlbertForTasks, batch: ExampleBatch) -> dict[str, LossSums]:
        sums = cross_entropy(cls_logits(model, batch), batch.targets)
        factor = math.inf if self.num_taken in self.spoiled else 1.0
        return {TASK: replace(sums, loss=sums.loss * factor)}

    def answer(
        self, _model: AlbertForTasks, _part: slice, *, should_stop: Callable[[], bool]
    ) -> list[int] | None:
        self.in_validation.get(self.num_taken, lambda: None)()
        return None if should_stop() else [self.num_taken]

    def compute_metrics(self, answers: Sequence[int]) -> dict[str, float]:
        return {"accuracy": self.accuracies.get(answers[0], 0.5)}


def micro_batch(ids_BS: torch.Tensor) -> ExampleBatch:
    size, length = ids_BS.shape
    return ExampleBatch(
        task=TASK,
        tokens=ModelInputs(ids=ids_BS, types=torch.zeros_like(ids_BS)),
        num_tokens=ids_BS.numel(),
        counts={TASK: size},
        firsts=torch.arange(0, size * length, length),
        sizes=torch.full((size,), length),
        targets=ids_BS[:, 1] % 3,
    )


def train(
    folder: Path,
    stub: Stub | None = None,
    *,
    num_steps: int | None = 8,
    budget_s: float | None = None,
    validate_every: int = 0,
    selection: BestValidation | None = None,
    config: AlbertConfig = CONFIG,
    precision: PrecisionName = "fp32",
    **folder_options: Any,
) -> TrainedRun:
    """Train or resume the stub's run.

    Args:
        validate_every: number of steps between validations, or 0 for no validation.
        folder_options: other fields of the run's `RunFolder`.
    """
    stub = stub or Stub()
    run = build_run(
        our_model(config, (TASK,)).train(),
        Mixture(streams=[stub], weights=[1.0], loss_weights={}),
        {TASK: stub.loss},
        HYPERPARAMETERS,
        progress=Progress(num_steps=num_steps, budget_s=budget_s),
        world=World(),
        precision=precision,
        selection=selection,
    )
    folder_options = {"save_every": NEVER_S, "keep": 9, "report_every": 1, **folder_options}
    prepared = PreparedRun(
        config=RunFolder(output=folder, **folder_options),
        run=run,
        record={},
        program="albert-serve stub",
        stage={},
        start=None,
        tokenizer_from=folder,
        extra_config={},
        validation=Validation(held_out=stub) if validate_every else None,
        validate_every=validate_every,
        validates_start=selection is not None,
    )
    # Only steps take time on the run's clock.
    clock = SimpleNamespace(monotonic=lambda: stub.now_s)
    with ExitStack() as stack:
        for name in ("trainer", "progress", "metrics"):
            stack.enter_context(patch(f"training.loop.{name}.time", clock))
        return train_run(prepared)
