"""Distillation losses: hidden states and attention relations, span by span.

Shape legend: B rows, S positions, T = B * S student's tokens, R rows, H hidden size, N relation
heads, D = H / N.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from training.data.batch import LossName
from training.distillation.batches import DistilBatch, StudentSpans
from training.distillation.teacher import Teacher
from training.losses import HeadSums, Reading, Score, head_sums, mark_dynamic, scores_of
from training.model.albert import Attention, Batch, Packing, project
from training.model.heads import AlbertForTasks


@dataclass(frozen=True, kw_only=True, slots=True)
class Objectives:
    """The distillation objectives: layers and relations to match.

    Attributes:
        layers: pairs of a student's and a teacher's layer, from 1, whose hidden states are matched.
        num_relation_heads: heads into which the last layers' queries, keys and values are split to
            match their relations (MiniLMv2, arXiv 2012.15828), independent of either model's number
            of attention heads; 0 to match no relations.
    """

    layers: tuple[tuple[int, int], ...]
    num_relation_heads: int = 0

    @property
    def names(self) -> tuple[LossName, ...]:
        """The names of the distillation losses."""
        hidden: tuple[LossName, ...] = ("hidden-states",) if self.layers else ()
        relations: tuple[LossName, ...] = ("attention-relations",)
        return hidden + (relations if self.num_relation_heads else ())


class TeacherTargets(NamedTuple):
    """Means of the teacher's states over each span, at the position of the student's first token.

    Attributes:
        hidden: of each matched layer, (T, H).
        attention: queries, keys and values, (T, H); empty if relations are not matched.
    """

    hidden: tuple[Tensor, ...]
    attention: tuple[Tensor, ...]


class StudentStates(NamedTuple):
    """A student's outputs.

    Attributes:
        heads: the sums of pretraining.
        hidden: of each matched layer, (B, S, H).
        attention: queries, keys and values of the last layer, (B, S, H); empty if relations are
            not matched.
    """

    heads: HeadSums
    hidden: tuple[Tensor, ...]
    attention: tuple[Tensor, ...]


class _DistilSums(NamedTuple):
    """The sums of pretraining, and the distillation losses as means over spans.

    Attributes:
        unexplained: unexplained fraction of the variance of the teacher's hidden states, mean over
            the layers.
        relations: KL divergence (nats) of the student's relations from the teacher's, mean over
            queries, keys and values.
        agreement: fraction of the relations whose strongest span is the same.
    """

    heads: HeadSums
    unexplained: Tensor | None
    relations: Tensor | None
    agreement: Tensor | None


def span_sums(rows_RH: Tensor, spans_R: Tensor, weights_R: Tensor, num_tokens: int) -> Tensor:
    """Return weighted sums (T, H) of rows by span, in fp32; rows of the span T are dropped."""
    sums_TH = rows_RH.new_zeros(num_tokens + 1, rows_RH.shape[-1], dtype=torch.float32)
    sums_TH = sums_TH.index_add(0, spans_R, rows_RH.float() * weights_R[:, None])
    return sums_TH[:num_tokens]


def teacher_targets(teacher: Teacher, batch: DistilBatch, objectives: Objectives) -> TeacherTargets:
    """Run the teacher on an unmasked batch, and return the means of its states over spans."""
    spans = batch.teacher
    states = teacher.states(
        spans.batch,
        [layer for _, layer in objectives.layers],
        with_attention=objectives.num_relation_heads > 0,
    )
    num_tokens = len(batch.student_spans.spans)

    def means(state_CNH: Tensor) -> Tensor:
        rows_RH = state_CNH.flatten(0, 1)[spans.rows]
        return span_sums(rows_RH, spans.spans, spans.weights, num_tokens)

    return TeacherTargets(
        tuple(means(state) for state in states.hidden),
        tuple(means(state) for state in states.attention),
    )


def student_states(
    objectives: Objectives,
    model: AlbertForTasks,
    tokens: Batch,
    reading: Reading,
) -> StudentStates:
    """Run the student; takes only tensors, so that it can be compiled.

    The comparison with the teacher is separate: its cost is negligible beside the layers.
    """
    states = list(model.albert.states(tokens))
    read_RH = states[-1].flatten(0, 1)[reading.positions]
    with_attention = objectives.num_relation_heads > 0
    return StudentStates(
        head_sums(model, read_RH, reading),
        tuple(states[layer] for layer, _ in objectives.layers),
        _last_attention(model, states[-2]) if with_attention else (),
    )


def compare(
    objectives: Objectives,
    student: StudentStates,
    targets: TeacherTargets,
    spans: StudentSpans,
    packing: Packing,
) -> _DistilSums:
    """Compare a student's states with its teacher's, span by span."""
    unexplained = relations = agreement = None
    if objectives.layers:
        parts = [
            unexplained_variance(_pooled(state, spans), target_TH, spans.is_span)
            for state, target_TH in zip(student.hidden, targets.hidden, strict=True)
        ]
        unexplained = torch.stack(parts).mean()
    if objectives.num_relation_heads:
        shape = packing.sequences.shape
        mask_BSS = _relation_mask(packing.sequences, spans.is_span.view(shape))
        results = [
            relation_divergence(
                _pooled(state, spans).view(*shape, -1),
                target_TH.view(*shape, -1),
                mask_BSS,
                objectives.num_relation_heads,
            )
            for state, target_TH in zip(student.attention, targets.attention, strict=True)
        ]
        relations = torch.stack([divergence for divergence, _ in results]).mean()
        agreement = torch.stack([right for _, right in results]).mean()
    return _DistilSums(student.heads, unexplained, relations, agreement)


def _pooled(state_BSH: Tensor, spans: StudentSpans) -> Tensor:
    return span_sums(state_BSH.flatten(0, 1), spans.spans, spans.weights, len(spans.spans))


def unexplained_variance(states_TH: Tensor, targets_TH: Tensor, is_span_T: Tensor) -> Tensor:
    """Return the fraction of the targets' variance over spans that the states do not explain."""
    is_span_T1 = is_span_T[:, None].to(targets_TH.dtype)
    mean_H = (targets_TH * is_span_T1).sum(0) / is_span_T1.sum()
    variance = ((targets_TH - mean_H).square() * is_span_T1).sum()
    error = ((states_TH - targets_TH).square() * is_span_T1).sum()
    return error / variance


def _last_attention(model: AlbertForTasks, state_BSH: Tensor) -> tuple[Tensor, ...]:
    """Compute queries, keys and values (B, S, H) of the last layer from its input."""
    encoder = model.albert.encoder
    block = encoder.attentions[encoder.layer_plan[-1][0]]
    assert isinstance(block, Attention)
    return tuple(project(part, state_BSH) for part in (block.query, block.key, block.value))


def _relation_mask(sequences_BS: Tensor, is_span_BS: Tensor) -> Tensor:
    """Return (B, S, S) bool, whether both are spans of one sequence."""
    same_BSS = sequences_BS[:, :, None] == sequences_BS[:, None, :]
    return same_BSS & is_span_BS[:, :, None] & is_span_BS[:, None, :]


def relation_divergence(
    states_BSH: Tensor, targets_BSH: Tensor, mask_BSS: Tensor, num_heads: int
) -> tuple[Tensor, Tensor]:
    """Return the mean KL divergence (nats) of scaled dot-product relations, and their agreement.

    The hidden sizes may differ; each is split into `num_heads` heads.
    """
    logs_BNSS = _relations(states_BSH, mask_BSS, num_heads)
    targets_BNSS = _relations(targets_BSH, mask_BSS, num_heads)
    mask_B1SS = mask_BSS[:, None]
    terms_BNSS = targets_BNSS.exp() * (targets_BNSS - logs_BNSS)
    num_rows = mask_BSS.any(-1).sum() * num_heads
    divergence = terms_BNSS.masked_fill(~mask_B1SS, 0.0).sum() / num_rows
    agrees_BNS = (logs_BNSS.argmax(-1) == targets_BNSS.argmax(-1)) & mask_B1SS.any(-1)
    return divergence, agrees_BNS.sum() / num_rows


def _relations(state_BSH: Tensor, mask_BSS: Tensor, num_heads: int) -> Tensor:
    """Return log-probabilities (B, N, S, S) of each span's relations within its sequence."""
    shape = (*state_BSH.shape[:2], num_heads, -1)
    heads_BNSD = state_BSH.view(shape).transpose(1, 2).float()
    scores_BNSS = heads_BNSD @ heads_BNSD.transpose(-1, -2) / heads_BNSD.shape[-1] ** 0.5
    # Rows that are no span are left unmasked, so that none is empty; the caller ignores them.
    masked_BSS = ~mask_BSS & mask_BSS.any(-1, keepdim=True)
    return F.log_softmax(scores_BNSS.float().masked_fill(masked_BSS[:, None], -1e9), dim=-1)


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillationLoss:
    """Loss function of masked tokens, the sentence task, and the teacher's states or relations.

    Attributes:
        student: `student_states`, optionally compiled.
    """

    teacher: Teacher
    objectives: Objectives
    student: Callable[..., StudentStates] = student_states

    def __call__(self, model: AlbertForTasks, batch: DistilBatch) -> dict[LossName, Score]:
        """Return the scores of a batch by the loss' name."""
        targets = teacher_targets(self.teacher, batch, self.objectives)
        packing = batch.tokens.packing
        assert packing is not None
        reading = Reading.of(model, batch)
        if self.student is not student_states:
            mark_dynamic(reading)
        states = self.student(self.objectives, model, batch.tokens, reading)
        sums = compare(self.objectives, states, targets, batch.student_spans, packing)
        return distil_scores(batch, sums)


def distil_scores(batch: DistilBatch, sums: _DistilSums) -> dict[LossName, Score]:
    """Return the scores by the loss' name.

    The loss of hidden states is the unexplained fraction of the variance, and its accuracy the
    explained one; the loss of relations is their divergence, and its accuracy their agreement.
    """
    scores = scores_of(batch, sums.heads)
    count = batch.num_spans
    if sums.unexplained is not None:
        error = sums.unexplained
        scores["hidden-states"] = Score(
            loss=error * count, right=(1 - error.detach()) * count, count=count
        )
    if sums.relations is not None and sums.agreement is not None:
        scores["attention-relations"] = Score(
            loss=sums.relations * count, right=sums.agreement * count, count=count
        )
    return scores
