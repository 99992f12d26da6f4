"""The loss of distillation, against loops over spans."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from albert_serve.config import AlbertConfig
from albert_serve.tokenizer import AlbertTokenizer
from training.data.collate import Collator
from training.data.examples import Example
from training.data.masking import NgramMasking, word_starts
from training.data.shards import Shards
from training.distillation.alignment import Aligner
from training.distillation.batches import DistilBatch, DistilCollator
from training.distillation.losses import (
    DistillationLoss,
    mean_states,
)
from training.distillation.start import sizes_of
from training.distillation.teacher import Teacher
from training.model.heads import AlbertForTasks

LENGTH = 48
LAYERS = ((1, 1), (2, 3))


def collate(
    tokenizer: AlbertTokenizer,
    teacher: Teacher,
    shards: Shards,
    max_teacher: int | None = None,
    *,
    has_labels: bool = True,
) -> DistilBatch:
    """Two rows of two examples each, of which the last is a pair."""
    collator = DistilCollator(
        student=Collator(
            shards=shards,
            masking=NgramMasking(word_starts=word_starts(tokenizer), rate=0.2),
            length=LENGTH,
            seed=0,
            has_labels=has_labels,
        ),
        aligner=Aligner(tokenizer, teacher.tokenizer),
        pad_id=teacher.tokenizer.pad_id,
        max_teacher=max_teacher or teacher.max_positions,
    )
    bounds = [(0, 20, 20, 20), (40, 58, 58, 58), (70, 85, 85, 85), (100, 108, 108, 120)]
    examples = [
        Example(part=0, epoch=0, number=number, bounds=each, label=-100)
        for number, each in enumerate(bounds)
    ]
    return collator([examples[:2], examples[2:]])


@pytest.fixture
def batch(tokenizer: AlbertTokenizer, teacher: Teacher, shards: Shards) -> DistilBatch:
    return collate(tokenizer, teacher, shards)


@pytest.fixture
def student(teacher: Teacher) -> AlbertForTasks:
    torch.manual_seed(0)
    sizes = AlbertConfig(vocab_size=800, embedding_size=16, **sizes_of(teacher))
    return AlbertForTasks(sizes, {"fill-mask": 800})


def states_of_teacher(teacher: Teacher, batch: DistilBatch) -> tuple[Tensor, ...]:
    return teacher.states(batch.teacher_tokens, [layer for _, layer in LAYERS])


@torch.no_grad()
def test_spans_of_several_pieces_are_means(batch: DistilBatch, teacher: Teacher) -> None:
    """Of the teacher's states, in fp32, at the span's first token; elsewhere 0."""
    rows = batch.teacher_rows
    state = states_of_teacher(teacher, batch)[0]
    means = mean_states(state, rows, len(batch.is_span))
    several = [span for span in set(rows.spans.tolist()) if (rows.spans == span).sum() > 1]
    assert len(several) > 5
    for span in several:
        own = state.flatten(0, 1)[rows.rows[rows.spans == span]]
        assert torch.allclose(means[span], own.mean(0), atol=1e-5)
    assert means[~batch.is_span].abs().max() == 0
    for each in (rows, batch.student_rows):
        assert set(each.spans.tolist()) == set(torch.nonzero(batch.is_span)[:, 0].tolist())
    assert mean_states(state.bfloat16(), rows, len(batch.is_span)).dtype == torch.float32


def test_the_teacher_reads_each_sequence_alone_and_unmasked(
    batch: DistilBatch, tokenizer: AlbertTokenizer, teacher: Teacher, shards: Shards
) -> None:
    read, hf = batch.teacher_tokens, teacher.tokenizer.hf
    assert len(read.ids) == 4
    assert (batch.tokens.ids == 4).any()
    assert not (read.ids == hf.mask_token_id).any()
    assert (read.ids[:, 0] == teacher.tokenizer.cls_id).all()
    assert ((read.ids == teacher.tokenizer.sep_id).sum(1) == torch.tensor([1, 1, 1, 2])).all()
    assert read.types.sum(1).tolist()[:3] == [0, 0, 0]
    assert (read.ids[~read.is_real] == teacher.tokenizer.pad_id).all()
    words = [tokenizer.token(int(index)) for index in shards.parts[0].tokens[:20]]
    text = "".join(words).replace("▁", "")
    pieces = hf.convert_ids_to_tokens(read.ids[0][read.is_real[0]].tolist())
    assert "".join(piece.removeprefix("##") for piece in pieces[1:-1]) == text


def test_spans_that_the_teacher_cannot_read_are_ignored(
    tokenizer: AlbertTokenizer, teacher: Teacher, shards: Shards
) -> None:
    whole, short = (collate(tokenizer, teacher, shards, size) for size in (64, 10))
    assert short.teacher_tokens.is_real.sum(1).tolist() == [10] * 4
    assert short.num_spans < whole.num_spans
    assert short.num_spans == int(short.is_span.sum())
    rows = short.teacher_rows.rows % short.teacher_tokens.ids.shape[1]
    assert rows.max() == 9


def test_losses_give_gradients_to_the_student_alone(
    batch: DistilBatch, student: AlbertForTasks, teacher: Teacher
) -> None:
    scores = DistillationLoss(teacher=teacher, layers=LAYERS)(student, batch)
    assert list(scores) == ["fill-mask", "hidden-states"]
    assert scores["hidden-states"].count == batch.num_spans
    scores["hidden-states"].loss.backward()  # type: ignore[no-untyped-call]
    gradient = student.albert.embeddings.word.weight.grad
    assert gradient is not None
    assert gradient.isfinite().all()
    assert gradient.abs().max() > 0
    assert all(parameter.grad is None for parameter in teacher.model.parameters())
