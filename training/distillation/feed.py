"""Task stream of distillation: masked tokens of a corpus, and the teacher's states of its text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from training.distillation.batches import DistilBatch
from training.distillation.losses import (
    Objectives,
    StudentStates,
    compare,
    distil_scores,
    student_states,
    teacher_targets,
)
from training.distillation.teacher import Teacher
from training.model.heads import AlbertForTasks
from training.objectives.feeds import MicroBatch, PlannedFeed, counts_of
from training.objectives.losses import LossName, Score
from training.precision import precision


@dataclass(kw_only=True)
class DistilFeed(PlannedFeed[DistilBatch]):
    """Task stream of masked tokens, the sentence task, and the teacher's states or relations.

    Attributes:
        student: `student_states`, optionally compiled.
    """

    teacher: Teacher
    objectives: Objectives
    student: Callable[..., StudentStates] = student_states

    @property
    def losses(self) -> tuple[LossName, ...]:
        """The losses of its tasks, and those of distillation."""
        return (*self.tasks, *self.objectives.names)

    def make_micro_batch(self, batch: DistilBatch) -> MicroBatch:
        """Return a collated batch as a micro-batch."""
        counts = counts_of(batch.student)
        counts |= dict.fromkeys(self.objectives.names, batch.num_spans)
        return MicroBatch(
            num_tokens=batch.student.num_tokens,
            counts={name: counts[name] for name in self.losses},
            scores=partial(self._scores, batch),
        )

    def _scores(
        self, batch: DistilBatch, model: AlbertForTasks, device: torch.device
    ) -> Mapping[LossName, Score]:
        batch = batch.to(device)
        with precision(device):
            targets = teacher_targets(self.teacher, batch, self.objectives)
        read = batch.student
        packing = read.tokens.packing
        assert packing is not None
        states = self.student(
            self.objectives,
            model,
            read.tokens,
            (read.rows, read.targets, read.firsts, read.labels),
        )
        sums = compare(self.objectives, states, targets, batch.student_spans, packing)
        return distil_scores(batch, sums, self.losses)
