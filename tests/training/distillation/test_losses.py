"""The losses of distillation, against loops over spans and sequences."""

from __future__ import annotations

import numpy as np
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
    Objectives,
    StudentStates,
    TeacherTargets,
    compare,
    distil_scores,
    relation_divergence,
    span_sums,
    student_states,
    teacher_targets,
    unexplained_variance,
)
from training.distillation.start import sizes_of
from training.distillation.teacher import Teacher
from training.losses import Reading
from training.model.heads import AlbertForTasks

LENGTH = 48
BOTH = Objectives(layers=((1, 1), (2, 3)), num_relation_heads=4)


def rows_of(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


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


def states_of(student: AlbertForTasks, batch: DistilBatch, objectives: Objectives) -> StudentStates:
    return student_states(objectives, student, batch.tokens, Reading.of(student, batch))


def test_the_mean_explains_nothing() -> None:
    teacher, is_span = 5 + rows_of(20, 4), torch.arange(20) % 3 > 0
    mean = teacher[is_span].mean(0).expand(20, -1)
    assert unexplained_variance(mean, teacher, is_span) == pytest.approx(1.0, rel=1e-5)
    scaled = unexplained_variance(7 * mean, 7 * teacher, is_span)
    assert scaled == pytest.approx(1.0, rel=1e-5)


def test_sums_over_spans_are_those_of_a_loop() -> None:
    rows = rows_of(30, 4)
    spans = torch.from_numpy(np.random.default_rng(0).integers(0, 11, 30))  # 10 counts for nothing
    weights = rows_of(30, seed=1)
    expected = torch.zeros(10, 4)
    for row, span, weight in zip(rows, spans.tolist(), weights, strict=True):
        if span < 10:
            expected[span] += weight * row
    assert torch.allclose(span_sums(rows, spans, weights, 10), expected, atol=1e-6)
    assert span_sums(rows.bfloat16(), spans, weights, 10).dtype == torch.float32


@pytest.fixture
def pair_mask() -> Tensor:
    """(2, 8, 8) rows of two sequences each, whose last two slots are padded and third no span."""
    sequences = torch.tensor([[0, 0, 0, 0, 1, 1, -1, -1], [0, 0, 0, 1, 1, 1, -1, -1]])
    is_span = (sequences >= 0) & (torch.arange(8) != 2)
    same = sequences[:, :, None] == sequences[:, None, :]
    return same & is_span[:, :, None] & is_span[:, None, :]


def test_relations_are_those_of_a_loop_whatever_the_widths(pair_mask: Tensor) -> None:
    student, teacher = rows_of(2, 8, 12), rows_of(2, 8, 20, seed=1)
    divergences: list[Tensor] = []
    agreements: list[bool] = []
    for row in range(2):
        for slot in range(8):
            others = torch.nonzero(pair_mask[row, slot])[:, 0]
            for head in range(4) if len(others) else ():
                logs = []
                for states, size in ((student, 3), (teacher, 5)):
                    part = states[row, :, head * size : (head + 1) * size]
                    logs.append((part[others] @ part[slot] / size**0.5).log_softmax(0))
                divergences.append((logs[1].exp() * (logs[1] - logs[0])).sum())
                agreements.append(bool(logs[0].argmax() == logs[1].argmax()))
    divergence, agreement = relation_divergence(student, teacher, pair_mask, 4)
    assert divergence == pytest.approx(float(torch.stack(divergences).mean()), rel=1e-4)
    assert agreement == pytest.approx(np.mean(agreements))
    assert divergence > 0.1


def test_padding_and_slots_outside_spans_change_no_relation(pair_mask: Tensor) -> None:
    student, teacher = rows_of(2, 8, 12), rows_of(2, 8, 12, seed=1)
    before = relation_divergence(student, teacher, pair_mask, 3)
    for states in (student, teacher):
        states[:, [2, 6, 7]] = rows_of(2, 3, 12, seed=5) * 50
    assert relation_divergence(student, teacher, pair_mask, 3) == before


@torch.no_grad()
def test_targets_of_several_pieces_are_means(batch: DistilBatch, teacher: Teacher) -> None:
    (target,) = teacher_targets(teacher, batch, Objectives(layers=((1, 2),))).hidden
    spans = batch.teacher
    state = teacher.states(spans.batch, [2], with_attention=False).hidden[0].flatten(0, 1)
    several = [span for span in set(spans.spans.tolist()) if (spans.spans == span).sum() > 1]
    assert len(several) > 5
    for span in several:
        assert torch.allclose(
            target[span], state[spans.rows[spans.spans == span]].mean(0), atol=1e-5
        )
    is_span = batch.student_spans.is_span
    assert target[~is_span].abs().max() == 0
    assert set(spans.spans.tolist()) == set(torch.nonzero(is_span)[:, 0].tolist())


def test_the_teacher_reads_each_sequence_alone_and_unmasked(
    batch: DistilBatch, tokenizer: AlbertTokenizer, teacher: Teacher, shards: Shards
) -> None:
    spans, hf = batch.teacher, teacher.tokenizer.hf
    assert len(spans.ids) == 4
    assert (batch.tokens.ids == 4).any()
    assert not (spans.ids == hf.mask_token_id).any()
    assert (spans.ids[:, 0] == teacher.tokenizer.cls_id).all()
    assert ((spans.ids == teacher.tokenizer.sep_id).sum(1) == torch.tensor([1, 1, 1, 2])).all()
    assert spans.types.sum(1).tolist()[:3] == [0, 0, 0]
    assert (spans.ids[~spans.is_real] == teacher.tokenizer.pad_id).all()
    words = [tokenizer.token(int(index)) for index in shards.parts[0].tokens[:20]]
    text = "".join(words).replace("▁", "")
    read = hf.convert_ids_to_tokens(spans.ids[0][spans.is_real[0]].tolist())
    assert "".join(token.removeprefix("##") for token in read[1:-1]) == text


def test_spans_that_the_teacher_cannot_read_are_ignored(
    tokenizer: AlbertTokenizer, teacher: Teacher, shards: Shards
) -> None:
    whole, cut = (collate(tokenizer, teacher, shards, size) for size in (64, 10))
    assert cut.teacher.is_real.sum(1).tolist() == [10] * 4
    assert cut.num_spans < whole.num_spans
    assert cut.num_spans == int(cut.student_spans.is_span.sum())
    targets = teacher_targets(teacher, cut, BOTH)
    assert all(target.isfinite().all() for target in targets.hidden + targets.attention)


@torch.no_grad()
def test_a_students_own_states_are_explained_whole(
    batch: DistilBatch, student: AlbertForTasks
) -> None:
    """Its own means over spans, in the place of the teacher's."""
    states = states_of(student, batch, BOTH)
    spans = batch.student_spans
    num_tokens = len(spans.spans)

    def pooled(state: Tensor) -> Tensor:
        return span_sums(state.flatten(0, 1), spans.spans, spans.weights, num_tokens)

    own = TeacherTargets(tuple(map(pooled, states.hidden)), tuple(map(pooled, states.attention)))
    packing = batch.tokens.packing
    assert packing is not None
    sums = compare(BOTH, states, own, spans, packing)
    assert sums.unexplained == pytest.approx(0.0, abs=1e-6)
    assert sums.relations == pytest.approx(0.0, abs=1e-6)
    assert sums.agreement == 1.0


def test_losses_give_gradients_to_the_student_alone(
    batch: DistilBatch, student: AlbertForTasks, teacher: Teacher
) -> None:
    targets = teacher_targets(teacher, batch, BOTH)
    packing = batch.tokens.packing
    assert packing is not None
    sums = compare(BOTH, states_of(student, batch, BOTH), targets, batch.student_spans, packing)
    scores = distil_scores(batch, sums)
    assert list(scores) == ["fill-mask", "hidden-states", "attention-relations"]
    assert scores["hidden-states"].count == batch.num_spans
    for name in ("hidden-states", "attention-relations"):
        student.zero_grad()
        scores[name].loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        gradient = student.albert.embeddings.word.weight.grad
        assert gradient is not None
        assert gradient.isfinite().all()
        assert gradient.abs().max() > 0
    assert all(parameter.grad is None for parameter in teacher.model.parameters())


def test_only_the_chosen_objectives_are_compared(
    batch: DistilBatch, student: AlbertForTasks, teacher: Teacher
) -> None:
    for objectives, names in (
        (Objectives(layers=((3, 3),)), ("hidden-states",)),
        (Objectives(layers=(), num_relation_heads=2), ("attention-relations",)),
        (BOTH, ("hidden-states", "attention-relations")),
    ):
        assert objectives.names == names
        targets = teacher_targets(teacher, batch, objectives)
        assert len(targets.hidden) == len(objectives.layers)
        assert len(targets.attention) == (3 if objectives.num_relation_heads else 0)
        states = states_of(student, batch, objectives)
        assert (len(states.hidden), len(states.attention)) == (
            len(targets.hidden),
            len(targets.attention),
        )
