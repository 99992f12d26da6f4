"""What a student is told by its teacher: hidden states and attention relations, span by span.

Shape legend: B rows, S positions, T = B * S student's tokens, R rows, H hidden size, N relation
heads, D = H / N.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from training.distillation.batches import DistilBatch, StudentSpans
from training.distillation.teacher import Teacher
from training.model.albert import Attention, Batch, Packing, project
from training.model.heads import AlbertForTasks
from training.objectives.losses import (
    LossName,
    PretrainSums,
    Score,
    head_sums,
    read_rows,
    scores_of,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Objectives:
    """What is matched.

    Attributes:
        layers: pairs of a student's and a teacher's layer, from 1, whose hidden states are.
        num_relation_heads: heads that the last layers' queries, keys and values are cut into to
            compare their relations (MiniLMv2, arXiv 2012.15828), whatever number of attention heads
            either model has; 0 where relations are not compared.
    """

    layers: tuple[tuple[int, int], ...]
    num_relation_heads: int = 0

    @property
    def names(self) -> tuple[LossName, ...]:
        """The losses that these add."""
        hidden: tuple[LossName, ...] = ("hidden-states",) if self.layers else ()
        relations: tuple[LossName, ...] = ("attention-relations",)
        return hidden + (relations if self.num_relation_heads else ())


class TeacherTargets(NamedTuple):
    """Means of the teacher's states over each span, at the place of the student's first token.

    Attributes:
        hidden: of each layer that is matched, (T, H).
        attention: queries, keys and values, (T, H); none where relations are not matched.
    """

    hidden: tuple[Tensor, ...]
    attention: tuple[Tensor, ...]


class StudentStates(NamedTuple):
    """What a student computed.

    Attributes:
        heads: the sums of pretraining.
        hidden: of each layer that is matched, (B, S, H).
        attention: queries, keys and values of the last layer, (B, S, H); none where relations are
            not matched.
    """

    heads: PretrainSums
    hidden: tuple[Tensor, ...]
    attention: tuple[Tensor, ...]


class DistilSums(NamedTuple):
    """The sums of pretraining, and means over spans of what the teacher's losses are.

    Attributes:
        unexplained: part of the variance of the teacher's hidden states that is not explained,
            mean over the layers.
        relations: KL divergence (nats) of the student's relations from the teacher's, mean over
            queries, keys and values.
        agreement: part of the relations whose strongest span is the same.
    """

    heads: PretrainSums
    unexplained: Tensor | None
    relations: Tensor | None
    agreement: Tensor | None


def span_sums(rows_RH: Tensor, spans_R: Tensor, weights_R: Tensor, num_tokens: int) -> Tensor:
    """Weighted sums (T, H) of rows by span, in fp32; rows of the span T are left out."""
    sums_TH = rows_RH.new_zeros(num_tokens + 1, rows_RH.shape[-1], dtype=torch.float32)
    sums_TH = sums_TH.index_add(0, spans_R, rows_RH.float() * weights_R[:, None])
    return sums_TH[:num_tokens]


def teacher_targets(teacher: Teacher, batch: DistilBatch, objectives: Objectives) -> TeacherTargets:
    """What the teacher makes of a batch, unmasked, as means over spans."""
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
    read: tuple[Tensor, Tensor, Tensor, Tensor],
) -> StudentStates:
    """What a student computes, a function of tensors alone so that it can be compiled.

    The comparison with the teacher is not part of it: it is a few passes over (T, H), next to
    nothing beside the layers.

    Args:
        read: rows, targets, firsts and labels of the `PretrainBatch`.
    """
    states = model.albert.states(tokens)
    rows_R, targets_R, firsts_C, labels_C = read
    read_RH = states[-1].flatten(0, 1)[read_rows(model, rows_R, firsts_C)]
    with_attention = objectives.num_relation_heads > 0
    return StudentStates(
        head_sums(model, read_RH, targets_R, labels_C),
        tuple(states[layer] for layer, _ in objectives.layers),
        _last_attention(model, states[-2]) if with_attention else (),
    )


def compare(
    objectives: Objectives,
    student: StudentStates,
    targets: TeacherTargets,
    spans: StudentSpans,
    packing: Packing,
) -> DistilSums:
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
        seen_BSS = _related(packing.sequences, spans.is_span.view(shape))
        found = [
            relation_divergence(
                _pooled(state, spans).view(*shape, -1),
                target_TH.view(*shape, -1),
                seen_BSS,
                objectives.num_relation_heads,
            )
            for state, target_TH in zip(student.attention, targets.attention, strict=True)
        ]
        relations = torch.stack([divergence for divergence, _ in found]).mean()
        agreement = torch.stack([right for _, right in found]).mean()
    return DistilSums(student.heads, unexplained, relations, agreement)


def _pooled(state_BSH: Tensor, spans: StudentSpans) -> Tensor:
    return span_sums(state_BSH.flatten(0, 1), spans.spans, spans.weights, len(spans.spans))


def unexplained_variance(found_TH: Tensor, wanted_TH: Tensor, is_span_T: Tensor) -> Tensor:
    """Part of the targets' variance, about their mean over spans, that what is found leaves."""
    is_span_T1 = is_span_T[:, None].to(wanted_TH.dtype)
    mean_H = (wanted_TH * is_span_T1).sum(0) / is_span_T1.sum()
    variance = ((wanted_TH - mean_H).square() * is_span_T1).sum()
    error = ((found_TH - wanted_TH).square() * is_span_T1).sum()
    return error / variance


def _last_attention(model: AlbertForTasks, state_BSH: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values (B, S, H) of the last layer, from what it reads."""
    encoder = model.albert.encoder
    block = encoder.attentions[encoder.layer_plan[-1][0]]
    assert isinstance(block, Attention)
    return tuple(project(part, state_BSH) for part in (block.query, block.key, block.value))


def _related(sequences_BS: Tensor, is_span_BS: Tensor) -> Tensor:
    """(B, S, S) bool, whether both are spans of one sequence."""
    same_BSS = sequences_BS[:, :, None] == sequences_BS[:, None, :]
    return same_BSS & is_span_BS[:, :, None] & is_span_BS[:, None, :]


def relation_divergence(
    found_BSH: Tensor, wanted_BSH: Tensor, seen_BSS: Tensor, num_heads: int
) -> tuple[Tensor, Tensor]:
    """Mean KL divergence (nats) of scaled dot-product relations, and how often their best agree.

    The widths of both may differ; each is cut into `num_heads` heads.
    """
    found_BNSS = _relations(found_BSH, seen_BSS, num_heads)
    wanted_BNSS = _relations(wanted_BSH, seen_BSS, num_heads)
    seen_B1SS = seen_BSS[:, None]
    terms_BNSS = wanted_BNSS.exp() * (wanted_BNSS - found_BNSS)
    num_rows = seen_BSS.any(-1).sum() * num_heads
    divergence = terms_BNSS.masked_fill(~seen_B1SS, 0.0).sum() / num_rows
    agrees_BNS = (found_BNSS.argmax(-1) == wanted_BNSS.argmax(-1)) & seen_B1SS.any(-1)
    return divergence, agrees_BNS.sum() / num_rows


def _relations(state_BSH: Tensor, seen_BSS: Tensor, num_heads: int) -> Tensor:
    """Log-probabilities (B, N, S, S) of each span's relation to the others of its sequence."""
    shape = (*state_BSH.shape[:2], num_heads, -1)
    heads_BNSD = state_BSH.view(shape).transpose(1, 2).float()
    scores_BNSS = heads_BNSD @ heads_BNSD.transpose(-1, -2) / heads_BNSD.shape[-1] ** 0.5
    # What is no span sees all, so that no row is empty; it counts for nothing.
    hidden_BSS = ~seen_BSS & seen_BSS.any(-1, keepdim=True)
    return F.log_softmax(scores_BNSS.float().masked_fill(hidden_BSS[:, None], -1e9), dim=-1)


def distil_scores(
    batch: DistilBatch, sums: DistilSums, losses: Sequence[LossName]
) -> dict[LossName, Score]:
    """Scores by the loss' name.

    The loss of hidden states is the part of the variance that is not explained, and its accuracy
    the part that is; that of relations is their divergence, and its accuracy their agreement.
    """
    scores = scores_of(batch.student, sums.heads)
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
    return {name: scores[name] for name in losses}
