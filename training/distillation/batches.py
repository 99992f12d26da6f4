"""Batches of distillation: the student's masked rows, and the same text in the teacher's tokens.

Shape legend: B rows, S positions, T = B * S student's tokens, C sequences, N teacher's tokens of
the longest sequence, R rows of hidden states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from training.data.batch import PretrainBatch
from training.data.collate import Collator, ReadExample, Rows
from training.distillation.alignment import AlignedSequence, Aligner, SpanMeans, span_means
from training.distillation.teacher import TeacherBatch

# The teacher's sequences are padded to a multiple of this.
_ROUNDING: Final = 8


@dataclass(frozen=True, slots=True)
class SpanRows:
    """The rows (R,) of a model's hidden states that belong to spans.

    Attributes:
        rows: indices into the flattened states.
        spans: the span of each row: the index of its first token among the student's T.
        weights: 1 / rows of that span, by which sums become means.
    """

    rows: Tensor
    spans: Tensor
    weights: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class DistilBatch(PretrainBatch):
    """A micro-batch of distillation: the student's masked rows, and the teacher's inputs.

    Attributes:
        teacher_tokens: the text in the teacher's tokens, unmasked.
        is_span: (T,) bool, whether a span of both models begins at the student's token.
    """

    task: str = "distillation"
    student_rows: SpanRows
    teacher_tokens: TeacherBatch
    teacher_rows: SpanRows
    is_span: Tensor

    @property
    def num_spans(self) -> int:
        """Spans that both models have."""
        return self.counts["hidden-states"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DistilCollator:
    """Collates examples: for the student as in pretraining, for the teacher aligned.

    Attributes:
        max_teacher: number of the teacher's positions; later tokens are truncated and not compared.
    """

    student: Collator
    aligner: Aligner
    pad_id: int
    max_teacher: int

    def __call__(self, rows: Rows) -> DistilBatch:
        """Collate rows of examples into a batch."""
        read = self.student.read(rows)
        aligned, students, teachers = zip(*self._aligned(read), strict=True)
        tokens = self._padded(aligned)
        width = tokens.ids.shape[1]
        student_rows = _joined(students)
        teacher_rows = _joined(
            [means._replace(rows=line * width + means.rows) for line, means in enumerate(teachers)]
        )
        is_span = torch.zeros(len(read) * self.student.length, dtype=torch.bool)
        is_span[student_rows.spans] = True
        batch, num_spans = self.student.batch(read), int(is_span.sum())
        return DistilBatch(
            tokens=batch.tokens,
            rows=batch.rows,
            targets=batch.targets,
            firsts=batch.firsts,
            labels=batch.labels,
            num_tokens=batch.num_tokens,
            counts={**batch.counts, "hidden-states": num_spans},
            student_rows=student_rows,
            teacher_tokens=tokens,
            teacher_rows=teacher_rows,
            is_span=is_span,
        )

    def _aligned(
        self, read: Sequence[Sequence[ReadExample]]
    ) -> Iterator[tuple[AlignedSequence, SpanMeans, SpanMeans]]:
        """Yield each sequence, and the rows of its spans in both models."""
        for line, row in enumerate(read):
            begin = line * self.student.length
            for _, ids, second in row:
                aligned = self.aligner.sequence(ids, second)
                students, teachers = span_means(
                    aligned.student_spans, aligned.teacher_spans, self.max_teacher
                )
                yield (
                    aligned,
                    students._replace(rows=begin + students.rows, spans=begin + students.spans),
                    teachers._replace(spans=begin + teachers.spans),
                )
                begin += len(ids)

    def _padded(self, sequences: Sequence[AlignedSequence]) -> TeacherBatch:
        """Truncate the teacher's sequences to its positions, and pad them on the right."""
        sizes = [min(len(sequence.teacher_ids), self.max_teacher) for sequence in sequences]
        shape = (len(sequences), -(-max(sizes) // _ROUNDING) * _ROUNDING)
        ids, types = np.full(shape, self.pad_id, np.int64), np.zeros(shape, np.int64)
        for line, (size, sequence) in enumerate(zip(sizes, sequences, strict=True)):
            ids[line, :size] = sequence.teacher_ids[:size]
            types[line, :size] = sequence.teacher_types[:size]
        is_real = torch.arange(shape[1]) < torch.tensor(sizes)[:, None]
        return TeacherBatch(torch.from_numpy(ids), torch.from_numpy(types), is_real)


def _joined(parts: Sequence[SpanMeans]) -> SpanRows:
    fields = zip(*parts, strict=True)
    return SpanRows(*(torch.from_numpy(np.concatenate(arrays)) for arrays in fields))
