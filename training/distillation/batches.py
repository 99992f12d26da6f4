"""Batches of distillation: the student's masked rows, and the same text in the teacher's tokens.

Shape legend: B rows, S positions, T = B * S student's tokens, C sequences, N teacher's tokens of
the longest sequence, R gathered positions of the teacher.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from training.data.batch import PretrainBatch
from training.data.collate import Collator, Rows
from training.distillation.alignment import AlignedSequence, Aligner, SpanMeans, span_means
from training.distillation.teacher import TeacherBatch

# The teacher's sequences are padded to a multiple of this.
_ROUNDING = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class StudentSpans:
    """The span of each of the student's tokens, with shapes that are the same in each batch.

    The index of a span is that of its first token among all T.

    Attributes:
        spans: (T,) index of the token's span; T where the teacher has no counterpart.
        weights: (T,) 1 / tokens of that span.
        is_span: (T,) bool, whether a span begins at the token.
    """

    spans: Tensor
    weights: Tensor
    is_span: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class _TeacherSpans:
    """The teacher's inputs, and the rows of its hidden states that belong to each span.

    Attributes:
        ids: (C, N) of the teacher's tokens, unmasked.
        types: (C, N).
        is_real: (C, N) bool, attention mask, False for padding.
        rows: (R,) gathered positions, as indices into the flattened (C * N).
        spans: (R,) index of each row's span.
        weights: (R,) 1 / teacher's tokens of that span.
    """

    ids: Tensor
    types: Tensor
    is_real: Tensor
    rows: Tensor
    spans: Tensor
    weights: Tensor

    @property
    def batch(self) -> TeacherBatch:
        """The teacher's inputs."""
        return TeacherBatch(self.ids, self.types, self.is_real)


@dataclass(frozen=True, kw_only=True, slots=True)
class DistilBatch(PretrainBatch):
    """A micro-batch of distillation: the student's masked rows, and the teacher's inputs."""

    task: str = "distillation"
    student_spans: StudentSpans
    teacher: _TeacherSpans

    @property
    def num_spans(self) -> int:
        """Spans that both models have."""
        return self.counts["hidden-states"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DistilCollator:
    """Collates examples: for the student as in pretraining, for the teacher aligned.

    Attributes:
        max_teacher: number of the teacher's positions; tokens beyond are cut and not compared.
    """

    student: Collator
    aligner: Aligner
    pad_id: int
    max_teacher: int

    def __call__(self, rows: Rows) -> DistilBatch:
        """Collate rows of examples into a batch."""
        read = self.student.read(rows)
        spans = _SpanLists(num_tokens=len(read) * self.student.length)
        for line, row in enumerate(read):
            begin = line * self.student.length
            for _, ids, second in row:
                spans.add(begin, self.aligner.sequence(ids, second), self.max_teacher)
                begin += len(ids)
        student, num_spans = self.student.batch(read), int(spans.is_span.sum())
        return DistilBatch(
            tokens=student.tokens,
            rows=student.rows,
            targets=student.targets,
            rates=student.rates,
            firsts=student.firsts,
            labels=student.labels,
            num_tokens=student.num_tokens,
            counts={
                **student.counts,
                "hidden-states": num_spans,
                "attention-relations": num_spans,
            },
            student_spans=spans.student_spans(),
            teacher=spans.teacher_spans(self.pad_id),
        )


@dataclass
class _SpanLists:
    """Sequences and spans, gathered over a batch."""

    num_tokens: int
    sequences: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = field(default_factory=list)
    means: list[SpanMeans] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.spans = np.full(self.num_tokens, self.num_tokens, np.int64)
        self.weights = np.zeros(self.num_tokens, np.float32)
        self.is_span = np.zeros(self.num_tokens, np.bool_)

    def add(self, begin: int, aligned: AlignedSequence, max_teacher: int) -> None:
        """Add the sequence whose first token is at `begin`."""
        students, teachers = span_means(aligned.student_spans, aligned.teacher_spans, max_teacher)
        self.spans[begin + students.rows] = begin + students.spans
        self.weights[begin + students.rows] = students.weights
        self.is_span[begin + students.spans] = True
        self.means.append(SpanMeans(teachers.rows, begin + teachers.spans, teachers.weights))
        self.sequences.append(
            (aligned.teacher_ids[:max_teacher], aligned.teacher_types[:max_teacher])
        )

    def student_spans(self) -> StudentSpans:
        return StudentSpans(
            spans=torch.from_numpy(self.spans),
            weights=torch.from_numpy(self.weights),
            is_span=torch.from_numpy(self.is_span),
        )

    def teacher_spans(self, pad_id: int) -> _TeacherSpans:
        longest = max(len(ids) for ids, _ in self.sequences)
        width = -(-longest // _ROUNDING) * _ROUNDING
        shape = (len(self.sequences), width)
        ids, types = np.full(shape, pad_id, np.int64), np.zeros(shape, np.int64)
        is_real = np.zeros(shape, np.bool_)
        for line, (sequence_ids, sequence_types) in enumerate(self.sequences):
            size = len(sequence_ids)
            ids[line, :size], types[line, :size] = sequence_ids, sequence_types
            is_real[line, :size] = True
        rows = [line * width + means.rows for line, means in enumerate(self.means)]
        return _TeacherSpans(
            ids=torch.from_numpy(ids),
            types=torch.from_numpy(types),
            is_real=torch.from_numpy(is_real),
            rows=_joined(rows),
            spans=_joined([means.spans for means in self.means]),
            weights=torch.from_numpy(np.concatenate([means.weights for means in self.means])),
        )


def _joined(parts: Sequence[NDArray[np.int64]]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts))
