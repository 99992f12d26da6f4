"""Losses are those by hand and of `transformers`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from albert_serve.tokenizer import AlbertTokenizer
from tests.training.support import TINY, copies, make_part, make_shards, our_model, randomize
from training.data.batch import ExampleBatch, PretrainBatch, TokenisedExample
from training.data.collate import Collator, collate_examples
from training.data.examples import IGNORED, Example
from training.data.masking import NgramMasking
from training.losses import cross_entropy
from training.model.albert import ModelInputs
from training.model.heads import AlbertForTasks, Task
from training.model.hf_names import parameters
from training.tasks.classification.loss import (
    classification_loss,
    multi_label_loss,
    regression_loss,
)
from training.tasks.multiple_choice.files import ChoiceExample
from training.tasks.multiple_choice.loss import choice_loss, collate_choices
from training.tasks.pretraining.files import OrderBatch
from training.tasks.pretraining.loss import paired_order_loss, pretrain_loss
from training.tasks.question_answering.loss import span_loss
from training.tasks.token_classification.loss import token_loss

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


@pytest.mark.parametrize("num_rows", [0, 3])
def test_no_target_costs_nothing_and_has_a_gradient(num_rows: int) -> None:
    logits = torch.randn(num_rows, 4, requires_grad=True)
    got = cross_entropy(logits, torch.full((num_rows,), IGNORED))
    assert (got.loss.item(), got.right.item(), got.count) == (0, 0, 0)
    got.loss.backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert not logits.grad.any()


def classified(
    task: Task, num_labels: int, targets: Sequence[Any]
) -> tuple[AlbertForTasks, ExampleBatch, Tensor]:
    """A model without dropout, a packed batch of three texts, and the logits of their tokens."""
    model = AlbertForTasks(TINY, {task: num_labels})
    randomize(model, seed=3)
    examples = [
        TokenisedExample(ids=ids, types=[0] * len(ids), target=label)
        for ids, label in zip([[2, 7, 3], [2, 9, 8, 3], [2, 11, 3]], targets, strict=True)
    ]
    batch = collate_examples(task, examples, row_length=8)
    with torch.no_grad():
        return model, batch, model.logits(task, model(batch.tokens)).flatten(0, 1)


def test_class_weights_weigh_the_losses_of_training_alone() -> None:
    model, batch, logits_TK = classified("text-classification", 2, [0, 1, 1])
    losses = F.cross_entropy(logits_TK[batch.firsts], batch.targets, reduction="none").tolist()
    weights = torch.tensor([1.0, 3.0])
    weighted = classification_loss(model.train(), batch, class_weights=weights)
    expected = losses[0] + 3 * losses[1] + 3 * losses[2]
    assert weighted["text-classification"].loss.item() == pytest.approx(expected, rel=1e-5)
    plain = classification_loss(model.eval(), batch, class_weights=weights)
    assert plain["text-classification"].loss.item() == pytest.approx(sum(losses), rel=1e-5)


def test_scores_and_several_labels_are_compared_with_their_targets() -> None:
    """A score is right if its error is below a half; all labels of a text must be right."""
    model, batch, _ = classified("text-classification", 1, [0.5, 0.25, -3.0])
    got = regression_loss(model, batch, lambda *_: torch.zeros(3, 1))["text-classification"]
    assert (got.loss.item(), got.right.item(), got.count) == (9.3125, 1, 3)
    targets = [(1.0, 0.0), (1.0, 1.0), (0.0, 0.0)]
    model, batch, _ = classified("text-classification", 2, targets)
    logits_CK = torch.tensor([[1.0, -2.0], [1.0, -1.0], [0.0, -3.0]])
    got = multi_label_loss(model, batch, lambda *_: logits_CK)["text-classification"]
    signs_CK = 2 * torch.tensor(targets) - 1
    expected = F.softplus(-signs_CK * logits_CK).sum().item() / 2
    assert got.loss.item() == pytest.approx(expected, rel=1e-5)
    assert (got.right.item(), got.count) == (2, 3)


def test_spans_and_tags_are_cross_entropies_of_tokens() -> None:
    """Of a span, start and end are halves; tokens behind an example's last are no candidates."""
    model, batch, logits_TK = classified("question-answering", 2, [(1, 2), (2, 2), (0, 0)])
    got = span_loss(model, batch)["question-answering"]
    losses, rights = [], []
    for first, size, bounds in zip(batch.firsts, batch.sizes, batch.targets, strict=True):
        for side, position in enumerate(bounds):
            logits_S = logits_TK[first : first + size, side]
            losses.append(F.cross_entropy(logits_S, position).item())
            rights.append(int(logits_S.argmax() == position))
    assert got.loss.item() == pytest.approx(sum(losses) / 2, rel=1e-5)
    assert (got.right.item(), got.count) == (sum(rights) / 2, 3)
    assert 0 < sum(rights) < 6
    ignored = IGNORED
    tags = [[ignored, 1, ignored], [ignored, 0, 2, ignored], [ignored, 2, ignored]]
    model, batch, logits_TK = classified("token-classification", 3, tags)
    rows = [
        int(batch.firsts[example]) + offset for example, offset in ((0, 1), (1, 1), (1, 2), (2, 1))
    ]
    expected = F.cross_entropy(logits_TK[rows], torch.tensor([1, 0, 2, 2]), reduction="sum")
    sums = token_loss(model, batch)["token-classification"]
    assert sums.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert sums.count == 4


def test_multiple_choice_has_the_gradient_of_transformers(tokenizer: AlbertTokenizer) -> None:
    ours, theirs = copies(TINY, "AlbertForMultipleChoice")
    examples = [
        ChoiceExample(
            context=np.arange(5, 9 + number, dtype=np.int32),
            choices=tuple(np.arange(20 + n, 21 + n + n % 3, dtype=np.int32) for n in range(4)),
            target=1,
            length=16,
        )
        for number in range(2)
    ]
    batch = collate_choices(examples, tokenizer, row_length=16)
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


def test_losses_of_pairs_in_both_orders_are_those_by_hand() -> None:
    """From the log-odds of "in order" of four pairs; a fifth only rounds up."""
    in_order, swapped = [2.0, -1.0, 3.0, 0.5], [-2.0, -3.0, 3.5, 1.5]
    odds = torch.tensor([*in_order, 9.0, *swapped, 9.0])
    labels = torch.tensor([*[0] * 4, IGNORED, *[1] * 4, IGNORED])
    empty = torch.zeros(1, 1, dtype=torch.long)
    batch = OrderBatch(
        tokens=ModelInputs(ids=empty, types=empty),
        firsts=torch.zeros(10, dtype=torch.long),
        labels=labels,
        num_tokens=1,
        counts={"sentence-order": 8, "paired-order": 4},
    )
    logits = torch.stack([odds + 1, torch.ones(10)], dim=1)
    got = dict(paired_order_loss(cast("Any", None), batch, logits=lambda *_: logits))
    pairs = list(zip(in_order, swapped, strict=True))
    paired = [math.log1p(math.exp(-(one - other) / 2)) for one, other in pairs]
    alone = [math.log1p(math.exp(-one)) + math.log1p(math.exp(other)) for one, other in pairs]
    assert float(got["paired-order"].loss) == pytest.approx(sum(paired), rel=1e-6)
    assert float(got["sentence-order"].loss) == pytest.approx(sum(alone), rel=1e-6)
    assert (int(got["paired-order"].right), got["paired-order"].count) == (2, 4)
    assert (int(got["sentence-order"].right), got["sentence-order"].count) == (5, 8)
