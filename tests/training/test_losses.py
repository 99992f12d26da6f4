"""Losses count what is asked for, and no more than that is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F

from albert_serve.tokenizer import AlbertTokenizer
from tests.training.support import (
    TINY,
    copies,
    make_part,
    make_shards,
    our_model,
    randomize,
)
from training.data.batch import ExampleBatch, PretrainBatch, TokenisedExample
from training.data.collate import Collator, collate_examples
from training.data.examples import IGNORED, Example
from training.data.masking import NgramMasking
from training.losses import cls_logits, compile_logits, cross_entropy
from training.model.albert import ModelInputs
from training.model.heads import AlbertForTasks, FillMaskHead, Task
from training.model.hf_names import parameters
from training.tasks.classification.loss import classification_loss, regression_loss
from training.tasks.multiple_choice.files import ChoiceExample
from training.tasks.multiple_choice.loss import ChoiceBatch, choice_loss, collate_choices
from training.tasks.pretraining.loss import pretrain_loss

pytestmark = pytest.mark.process

BOTH: tuple[Task, ...] = ("fill-mask", "sentence-order")
# A row of two sequences and padding, and one of a single segment.
ROWS = [
    [Example(0, 0, 0, (0, 3, 3, 5), 0), Example(0, 0, 1, (8, 9, 5, 8), 1)],
    [Example(0, 0, 2, (2, 9, 9, 9), IGNORED)],
]


def make_batch(rows: list[list[Example]]) -> PretrainBatch:
    shards = make_shards(make_part([[3, 2, 3, 1]], TINY.vocab_size))
    masking = NgramMasking(word_starts=np.ones(TINY.vocab_size, bool), rate=0.3)
    return Collator(shards=shards, masking=masking, length=16, seed=0)(rows)


@pytest.mark.parametrize("num_rows", [0, 3])
def test_no_target_costs_nothing_and_has_a_gradient(num_rows: int) -> None:
    logits = torch.randn(num_rows, 4, requires_grad=True)
    got = cross_entropy(logits, torch.full((num_rows,), IGNORED))
    assert (got.loss.item(), got.right.item(), got.count) == (0, 0, 0)
    got.loss.backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert not logits.grad.any()


def classified(num_labels: int, targets: Sequence[float]) -> tuple[AlbertForTasks, ExampleBatch]:
    """A model without dropout, and a packed batch of three texts."""
    model = AlbertForTasks(TINY, {"text-classification": num_labels})
    randomize(model, seed=3)
    examples = [
        TokenisedExample(ids=ids, types=[0] * len(ids), target=label)
        for ids, label in zip([[2, 7, 3], [2, 9, 8, 3], [2, 11, 3]], targets, strict=True)
    ]
    return model, collate_examples("text-classification", examples, row_length=8)


def test_class_weights_weigh_the_losses_of_training_alone() -> None:
    model, batch = classified(2, [0, 1, 1])
    each = F.cross_entropy(cls_logits(model, batch), batch.targets, reduction="none")
    weights = torch.tensor([1.0, 3.0])
    weighted = classification_loss(model.train(), batch, class_weights=weights)
    expected = each[0] + 3 * each[1] + 3 * each[2]
    got = weighted["text-classification"]
    assert got.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    plain = classification_loss(model.eval(), batch, class_weights=weights)
    assert plain["text-classification"].loss.item() == pytest.approx(each.sum().item(), rel=1e-5)


def test_a_regression_is_scored_by_squared_errors() -> None:
    """A model that says 0 is right where the error is below a half."""
    model, batch = classified(1, [0.5, 0.25, -3.0])
    with torch.no_grad():
        for parameter in model.heads.parameters():
            parameter.zero_()
    got = regression_loss(model, batch)["text-classification"]
    assert (got.loss.item(), got.right.item(), got.count) == (9.3125, 1, 3)


def asked(tokenizer: AlbertTokenizer) -> ChoiceBatch:
    """A packed batch of two questions with four choices, of one to three tokens."""
    examples = [
        ChoiceExample(
            context=np.arange(5, 9 + place, dtype=np.int32),
            choices=tuple(
                np.arange(20 + place, 21 + place + number % 3, dtype=np.int32) + number
                for number in range(4)
            ),
            target=1,
            length=16,
        )
        for place in range(2)
    ]
    return collate_choices(examples, tokenizer, row_length=16)


def test_multiple_choice_has_the_gradient_of_transformers(tokenizer: AlbertTokenizer) -> None:
    ours, theirs = copies(TINY, "AlbertForMultipleChoice")
    batch = asked(tokenizer)
    got = choice_loss(ours, batch)["multiple-choice"]
    assert got.count == 2
    (got.loss / got.count).backward()  # type: ignore[no-untyped-call]
    shape = (len(batch.sizes), int(batch.sizes.max()))
    is_real = torch.arange(shape[1]) < batch.sizes[:, None]
    ids, types = (torch.zeros(shape, dtype=torch.long) for _ in range(2))
    for row, (first, size) in enumerate(zip(batch.firsts, batch.sizes, strict=True)):
        ids[row, :size] = batch.tokens.ids.flatten()[first : first + size]
        types[row, :size] = batch.tokens.types.flatten()[first : first + size]
    inputs = {"input_ids": ids, "token_type_ids": types, "attention_mask": is_real.long()}
    labels = {"labels": batch.targets}
    out = theirs(**{name: value.view(2, 4, -1) for name, value in inputs.items()}, **labels)
    assert got.loss.item() / 2 == pytest.approx(out.loss.item(), rel=1e-5)
    assert got.right.item() == (out.logits.argmax(-1) == batch.targets).sum().item()
    out.loss.backward()
    expected = dict(theirs.named_parameters())
    for name, parameter in parameters(ours).items():
        assert parameter.grad is not None
        difference = (parameter.grad - expected[name].grad).abs().max()
        assert difference <= 1e-5 * expected[name].grad.abs().max() + 1e-7, name


def losses_by_hand(model: AlbertForTasks, batch: PretrainBatch) -> dict[str, float]:
    """Of every sequence by itself, from where its masked tokens and its [CLS] are."""
    assert batch.tokens.packing is not None
    totals = {"fill-mask": 0.0, "sentence-order": 0.0}
    bounds = [*batch.firsts[:3].tolist(), batch.tokens.ids.numel()]
    rows, targets = (x[: batch.counts["fill-mask"]] for x in (batch.rows, batch.targets))
    for number in range(3):
        inside = batch.tokens.packing.sequences.flatten()[bounds[number] : bounds[number + 1]]
        end = bounds[number] + int((inside == inside[0]).sum())
        alone = ModelInputs(
            ids=batch.tokens.ids.flatten()[None, bounds[number] : end],
            types=batch.tokens.types.flatten()[None, bounds[number] : end],
        )
        hidden = model(alone)[0]
        mine = (rows >= bounds[number]) & (rows < end)
        logits = model.logits("fill-mask", hidden[rows[mine] - bounds[number]])
        totals["fill-mask"] += F.cross_entropy(logits, targets[mine], reduction="sum").item()
        label = batch.labels[number]
        if label != IGNORED:
            logits = model.logits("sentence-order", hidden[:1])
            totals["sentence-order"] += F.cross_entropy(logits, label[None]).item()
    return totals


def test_pretraining_s_losses_are_those_of_each_sequence_alone() -> None:
    """Predictions that were rounded up count for nothing, nor do other rows."""
    model = our_model(TINY, BOTH)
    batch = make_batch(ROWS)
    assert batch.counts["fill-mask"] < len(batch.rows)
    got = pretrain_loss(model, batch)
    assert {name: each.count for name, each in got.items()} == {
        "fill-mask": batch.counts["fill-mask"],
        "sentence-order": 2,
    }
    with torch.no_grad():
        expected = losses_by_hand(model, batch)
    for name, each in got.items():
        assert each.loss.item() == pytest.approx(expected[name], rel=1e-5)


def test_pretraining_computes_the_vocabulary_for_masked_rows_only() -> None:
    model = our_model(TINY, BOTH)
    head = model.heads["fill-mask"]
    assert isinstance(head, FillMaskHead)
    shapes: list[tuple[int, ...]] = []
    head.decoder.register_forward_hook(lambda *arguments: shapes.append(tuple(arguments[2].shape)))
    batch = make_batch(ROWS * 16)
    pretrain_loss(model, batch)
    assert 64 < batch.counts["fill-mask"] < 128 < batch.num_tokens
    assert shapes == [(128, 50)]


def test_code_is_compiled_once_for_any_shape_of_packed_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where sizes of the first batch were equal."""
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    model = our_model(replace(TINY, max_positions=64), ("text-classification",))
    logits = compile_logits(cls_logits)
    for sizes, row_length in (([16, 16], 16), ([14, 3, 9, 12], 16), ([30, 31, 17], 32)):
        examples = [
            TokenisedExample(ids=[2, *[7] * (size - 2), 3], types=[0] * size, target=0)
            for size in sizes
        ]
        batch = collate_examples("text-classification", examples, row_length=row_length)
        torch.testing.assert_close(logits(model, batch), cls_logits(model, batch))
    assert counter.frame_count == 1
