"""Distillation losses: hidden states and attention relations, span by span.

Shape legend: B rows, S positions, T = B * S student's tokens, R rows, H hidden size, N relation
heads, D = H / N.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from training.data.batch import LossName
from training.distillation.batches import DistilBatch, SpanRows
from training.distillation.teacher import LayerStates, Teacher
from training.losses import HeadSums, LossSums, PretrainTargets, head_sums, losses_of, mark_dynamic
from training.model.albert import Attention, ModelInputs, project
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


def mean_states(state_H: Tensor, rows: SpanRows, num_tokens: int) -> Tensor:
    """Return the means (T, H) of states (..., H) over each span, in fp32, at its first token."""
    rows_RH = state_H.flatten(0, 1)[rows.rows]
    means_TH = rows_RH.new_zeros(num_tokens, rows_RH.shape[-1], dtype=torch.float32)
    return means_TH.index_add(0, rows.spans, rows_RH.float() * rows.weights[:, None])


def student_states(
    objectives: Objectives,
    model: AlbertForTasks,
    tokens: ModelInputs,
    reading: PretrainTargets,
) -> tuple[HeadSums, LayerStates]:
    """Run the student; takes only tensors, so that it can be compiled.

    The comparison with the teacher is separate: its cost is negligible beside the layers.
    """
    states = list(model.albert.states(tokens))
    read_RH = states[-1].flatten(0, 1)[reading.positions]
    with_attention = objectives.num_relation_heads > 0
    return head_sums(model, read_RH, reading), LayerStates(
        tuple(states[layer] for layer, _ in objectives.layers),
        _last_attention(model, states[-2]) if with_attention else (),
    )


def compare(
    objectives: Objectives, student: LayerStates, teacher: LayerStates, batch: DistilBatch
) -> dict[LossName, LossSums]:
    """Compare a student's states with its teacher's, span by span, and return the losses.

    The loss of hidden states is the unexplained fraction of the variance, mean over the layers, and
    its accuracy the explained one; the loss of relations is their divergence (nats), mean over
    queries, keys and values, and its accuracy the fraction whose strongest span is the same.
    """
    num_tokens, count = len(batch.is_span), batch.num_spans

    def both(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        for our, their in zip(ours, theirs, strict=True):
            yield (
                mean_states(our, batch.student_rows, num_tokens),
                mean_states(their, batch.teacher_rows, num_tokens),
            )

    losses: dict[LossName, LossSums] = {}
    if objectives.layers:
        parts = [
            unexplained_variance(states_TH, targets_TH, batch.is_span)
            for states_TH, targets_TH in both(student.hidden, teacher.hidden)
        ]
        error = torch.stack(parts).mean()
        losses["hidden-states"] = LossSums(
            loss=error * count, right=(1 - error.detach()) * count, count=count
        )
    if objectives.num_relation_heads:
        assert batch.tokens.packing is not None
        sequences_BS = batch.tokens.packing.sequences
        shape = sequences_BS.shape
        mask_BSS = _relation_mask(sequences_BS, batch.is_span.view(shape))
        results = [
            relation_divergence(
                states_TH.view(*shape, -1),
                targets_TH.view(*shape, -1),
                mask_BSS,
                objectives.num_relation_heads,
            )
            for states_TH, targets_TH in both(student.attention, teacher.attention)
        ]
        divergence, agreement = (torch.stack(each).mean() for each in zip(*results, strict=True))
        losses["attention-relations"] = LossSums(
            loss=divergence * count, right=agreement * count, count=count
        )
    return losses


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
    student: Callable[..., tuple[HeadSums, LayerStates]] = student_states

    def __call__(self, model: AlbertForTasks, batch: DistilBatch) -> dict[LossName, LossSums]:
        """Return the losses of a batch by the loss' name."""
        teacher = self.teacher.states(
            batch.teacher_tokens,
            [layer for _, layer in self.objectives.layers],
            with_attention=self.objectives.num_relation_heads > 0,
        )
        reading = PretrainTargets.of(model, batch)
        if self.student is not student_states:
            mark_dynamic(reading)
        sums, student = self.student(self.objectives, model, batch.tokens, reading)
        return {**losses_of(batch, sums), **compare(self.objectives, student, teacher, batch)}
