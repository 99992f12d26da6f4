"""Distillation loss: hidden states, span by span.

Shape legend: B rows, S positions, T = B * S student's tokens, R rows, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from training.data.batch import LossName
from training.distillation.batches import DistilBatch, SpanRows
from training.distillation.teacher import Teacher
from training.losses import HeadSums, LossSums, PretrainTargets, head_sums, losses_of, mark_dynamic
from training.model.albert import ModelInputs
from training.model.heads import AlbertForTasks

# Pairs of a student's and a teacher's layer, from 1, whose hidden states are matched.
LayerPairs: TypeAlias = tuple[tuple[int, int], ...]


def mean_states(state_H: Tensor, rows: SpanRows, num_tokens: int) -> Tensor:
    """Return the means (T, H) of states (..., H) over each span, in fp32, at its first token."""
    rows_RH = state_H.flatten(0, 1)[rows.rows]
    means_TH = rows_RH.new_zeros(num_tokens, rows_RH.shape[-1], dtype=torch.float32)
    return means_TH.index_add(0, rows.spans, rows_RH.float() * rows.weights[:, None])


def student_states(
    layers: LayerPairs, model: AlbertForTasks, tokens: ModelInputs, reading: PretrainTargets
) -> tuple[HeadSums, tuple[Tensor, ...]]:
    """Run the student; takes only tensors, so that it can be compiled.

    The comparison with the teacher is separate: its cost is negligible beside the layers.
    """
    states = list(model.albert.states(tokens))
    read_RH = states[-1].flatten(0, 1)[reading.positions]
    return head_sums(model, read_RH, reading), tuple(states[layer] for layer, _ in layers)


def compare(
    student: Sequence[Tensor], teacher: Sequence[Tensor], batch: DistilBatch
) -> dict[LossName, LossSums]:
    """Compare a student's hidden states with its teacher's, span by span, and return the loss.

    It is the unexplained fraction of the variance, mean over the layers; its accuracy is the
    explained one.
    """
    num_tokens, count = len(batch.is_span), batch.num_spans
    parts = [
        unexplained_variance(
            mean_states(ours, batch.student_rows, num_tokens),
            mean_states(theirs, batch.teacher_rows, num_tokens),
            batch.is_span,
        )
        for ours, theirs in zip(student, teacher, strict=True)
    ]
    error = torch.stack(parts).mean()
    result = LossSums(loss=error * count, right=(1 - error.detach()) * count, count=count)
    return {"hidden-states": result}


def unexplained_variance(states_TH: Tensor, targets_TH: Tensor, is_span_T: Tensor) -> Tensor:
    """Return the fraction of the targets' variance over spans that the states do not explain."""
    is_span_T1 = is_span_T[:, None].to(targets_TH.dtype)
    mean_H = (targets_TH * is_span_T1).sum(0) / is_span_T1.sum()
    variance = ((targets_TH - mean_H).square() * is_span_T1).sum()
    error = ((states_TH - targets_TH).square() * is_span_T1).sum()
    return error / variance


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillationLoss:
    """Loss function of masked tokens, the sentence task, and the teacher's hidden states.

    Attributes:
        student: `student_states`, optionally compiled.
    """

    teacher: Teacher
    layers: LayerPairs
    student: Callable[..., tuple[HeadSums, tuple[Tensor, ...]]] = student_states

    def __call__(self, model: AlbertForTasks, batch: DistilBatch) -> dict[LossName, LossSums]:
        """Return the losses of a batch by the loss' name."""
        layers = [layer for _, layer in self.layers]
        teacher = self.teacher.states(batch.teacher_tokens, layers)
        reading = PretrainTargets.of(model, batch)
        if self.student is not student_states:
            mark_dynamic(reading)
        sums, student = self.student(self.layers, model, batch.tokens, reading)
        return {**losses_of(batch, sums), **compare(student, teacher, batch)}
