"""Hyperparameters of a run: its optimizers, their rates and its seed."""

from __future__ import annotations

from dataclasses import dataclass

from training.optim.optimizers import OptimizerName, OptimizerSettings, Schedule, ScheduleName


@dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """The optimizers of a run, their rates over its length, and its seed.

    Attributes:
        lr: peak learning rate; with Muon of the layers' matrices, and `adamw_lr` of the rest.
        pooled_factor: learning-rate multiplier of the parameters that read the [CLS] row.
        warmup: fraction of the run that is warm-up.
        decay: fraction of the run that is decay (`wsd`).
        sentence_weight: weight of the sentence task's loss.
    """

    optimizer: OptimizerName
    lr: float
    adamw_lr: float
    pooled_factor: float
    weight_decay: float
    schedule: ScheduleName
    warmup: float
    decay: float
    sentence_weight: float
    clip_norm: float
    seed: int = 0

    @property
    def optimizer_settings(self) -> OptimizerSettings:
        """The settings of the optimizer."""
        return OptimizerSettings(
            name=self.optimizer,
            lr=self.lr,
            adamw_lr=self.adamw_lr,
            pooled_factor=self.pooled_factor,
            weight_decay=self.weight_decay,
        )

    @property
    def rate_schedule(self) -> Schedule:
        """The learning-rate schedule."""
        return Schedule(kind=self.schedule, warmup=self.warmup, decay=self.decay)

    @property
    def loss_weights(self) -> dict[str, float]:
        """The weights of the losses of sentence order."""
        return {"sentence-order": self.sentence_weight, "paired-order": self.sentence_weight}
