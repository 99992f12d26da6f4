"""Losses match values by hand, and the losses and gradients of `transformers`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from albert_serve.tokenizer import AlbertTokenizer
from tests.training.support import (
    TINY,
    make_part,
    make_shards,
    our_and_hf_models,
    our_model,
    randomize,
)
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

TASKS: tuple[Task, ...] = ("fill-mask", "sentence-order")
# A row of two sequences and padding, and a row of one segment.
ROWS = [
    [Example(0, 0, 0, (0, 3, 3, 5), 0), Example(0, 0, 1, (8, 9, 5, 8), 1)],
    [Example(0, 0, 2, (2, 9, 9, 9), IGNORED)],
]


def losses_by_hand(model: AlbertForTasks, batch: PretrainBatch) -> dict[str, float]:
    """Return the losses of the three sequences, computed separately at their [MASK] and [CLS]."""
    assert batch.tokens.packing is not None
    totals = {"fill-mask": 0.0, "sentence-order": 0.0}
    bounds = [*batch.firsts[:3].tolist(), batch.tokens.ids.numel()]
    rows, targets = (x[: batch.counts["fill-mask"]] for x in (batch.rows, batch.targets))
    for label, (begin, next_begin) in zip(batch.labels, pairwise(bounds), strict=False):
        sequences = batch.tokens.packing.sequences.flatten()[begin:next_begin]
        end = begin + int((sequences == sequences[0]).sum())
        ids, types = (x.flatten()[None, begin:end] for x in (batch.tokens.ids, batch.tokens.types))
        hidden = model(ModelInputs(ids=ids, types=types))[0]
        is_inside = (rows >= begin) & (rows < end)
        logits = model.logits("fill-mask", hidden[rows[is_inside] - begin])
        totals["fill-mask"] += F.cross_entropy(logits, targets[is_inside], reduction="sum").item()
        if label != IGNORED:
            logits = model.logits("sentence-order", hidden[:1])
            totals["sentence-order"] += F.cross_entropy(logits, label[None]).item()
    return totals


def test_losses_of_pretraining_are_those_of_separate_sequences() -> None:
    """Rows that only pad the number of predictions, and other sequences, have no effect."""
    model = our_model(TINY, TASKS)
    shards = make_shards(make_part([[3, 2, 3, 1]], TINY.vocab_size))
    masking = NgramMasking(word_starts=np.ones(TINY.vocab_size, bool), rate=0.3)
    batch = Collator(shards=shards, masking=masking, length=16, seed=0)(ROWS)
    assert batch.counts["fill-mask"] < len(batch.rows)
    sums = pretrain_loss(model, batch)
    assert {name: head_sums.count for name, head_sums in sums.items()} == {
        "fill-mask": batch.counts["fill-mask"],
        "sentence-order": 2,
    }
    with torch.no_grad():
        expected = losses_by_hand(model, batch)
    for name, head_sums in sums.items():
        assert head_sums.loss.item() == pytest.approx(expected[name], rel=1e-5)


@pytest.mark.parametrize("num_rows", [0, 3])
def test_without_targets_loss_and_gradient_are_zero(num_rows: int) -> None:
    logits = torch.randn(num_rows, 4, requires_grad=True)
    sums = cross_entropy(logits, torch.full((num_rows,), IGNORED))
    assert (sums.loss.item(), sums.right.item(), sums.count) == (0, 0, 0)
    sums.loss.backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert not logits.grad.any()


def run_head(
    task: Task, num_labels: int, targets: Sequence[Any]
) -> tuple[AlbertForTasks, ExampleBatch, Tensor]:
    """Return a model without dropout, a packed batch of three texts, and its tokens' logits."""
    model = AlbertForTasks(TINY, {task: num_labels})
    randomize(model, seed=3)
    examples = [
        TokenisedExample(ids=ids, types=[0] * len(ids), target=label)
        for ids, label in zip([[2, 7, 3], [2, 9, 8, 3], [2, 11, 3]], targets, strict=True)
    ]
    batch = collate_examples(task, examples, row_length=8)
    with torch.no_grad():
        return model, batch, model.logits(task, model(batch.tokens)).flatten(0, 1)


def test_class_weights_multiply_losses_only_in_training() -> None:
    model, batch, logits_TK = run_head("text-classification", 2, [0, 1, 1])
    losses = F.cross_entropy(logits_TK[batch.firsts], batch.targets, reduction="none").tolist()
    weights = torch.tensor([1.0, 3.0])
    weighted = classification_loss(model.train(), batch, class_weights=weights)
    expected = losses[0] + 3 * losses[1] + 3 * losses[2]
    assert weighted["text-classification"].loss.item() == pytest.approx(expected, rel=1e-5)
    plain = classification_loss(model.eval(), batch, class_weights=weights)
    assert plain["text-classification"].loss.item() == pytest.approx(sum(losses), rel=1e-5)


def test_losses_of_scores_and_several_labels_match_values_by_hand() -> None:
    """A score is right if its error is below 0.5. A text is right if all its labels are right."""
    model, batch, _ = run_head("text-classification", 1, [1.0, 0.25, -3.0])
    sums = regression_loss(model, batch, lambda *_: torch.full((3, 1), 0.5))["text-classification"]
    assert (sums.loss.item(), sums.right.item(), sums.count) == (12.5625, 1, 3)
    targets = [(1.0, 0.0), (1.0, 1.0), (0.0, 0.0)]
    model, batch, _ = run_head("text-classification", 2, targets)
    logits_CK = torch.tensor([[1.0, -2.0], [1.0, -1.0], [0.0, -3.0]])
    sums = multi_label_loss(model, batch, lambda *_: logits_CK)["text-classification"]
    signs_CK = 2 * torch.tensor(targets) - 1
    expected = F.softplus(-signs_CK * logits_CK).sum().item() / 2
    assert sums.loss.item() == pytest.approx(expected, rel=1e-5)
    assert (sums.right.item(), sums.count) == (2, 3)


def test_the_loss_of_a_span_is_the_mean_of_start_and_end() -> None:
    """Only tokens of the same example are candidates."""
    model, batch, logits_TK = run_head("question-answering", 2, [(1, 2), (2, 2), (0, 0)])
    sums = span_loss(model, batch)["question-answering"]
    losses, num_right = [], 0
    for first, size, bounds in zip(batch.firsts, batch.sizes, batch.targets, strict=True):
        for side, position in enumerate(bounds):
            logits_S = logits_TK[first : first + size, side]
            losses.append(F.cross_entropy(logits_S, position).item())
            num_right += int(logits_S.argmax() == position)
    assert sums.loss.item() == pytest.approx(sum(losses) / 2, rel=1e-5)
    assert (sums.right.item(), sums.count) == (num_right / 2, 3)
    assert 0 < num_right < 6


def test_the_loss_of_tags_is_the_cross_entropy_of_tagged_tokens() -> None:
    tags = [[IGNORED, 1, IGNORED], [IGNORED, 0, 2, IGNORED], [IGNORED, 2, IGNORED]]
    model, batch, logits_TK = run_head("token-classification", 3, tags)
    rows = batch.firsts[[0, 1, 1, 2]] + torch.tensor([1, 1, 2, 1])
    expected = F.cross_entropy(logits_TK[rows], torch.tensor([1, 0, 2, 2]), reduction="sum")
    sums = token_loss(model, batch)["token-classification"]
    assert sums.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert sums.count == 4


def test_multiple_choice_has_the_loss_and_gradient_of_transformers(
    tokenizer: AlbertTokenizer,
) -> None:
    our, hf = our_and_hf_models(TINY, "AlbertForMultipleChoice")
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
    sums = choice_loss(our, batch)["multiple-choice"]
    assert sums.count == 2
    (sums.loss / sums.count).backward()  # type: ignore[no-untyped-call]
    bounds = list(zip(batch.firsts, batch.firsts + batch.sizes, strict=True))
    ids, types, mask = (
        pad_sequence([x.flatten()[first:end] for first, end in bounds], batch_first=True)
        for x in (batch.tokens.ids, batch.tokens.types, torch.ones_like(batch.tokens.ids))
    )
    inputs = {"input_ids": ids, "token_type_ids": types, "attention_mask": mask}
    inputs = {name: value.view(2, 4, -1) for name, value in inputs.items()}
    hf_output = hf(**inputs, labels=batch.targets)
    assert sums.loss.item() / 2 == pytest.approx(hf_output.loss.item(), rel=1e-5)
    assert sums.right.item() == (hf_output.logits.argmax(-1) == batch.targets).sum().item()
    hf_output.loss.backward()
    expected = dict(hf.named_parameters())
    for name, parameter in parameters(our).items():
        assert parameter.grad is not None
        difference = (parameter.grad - expected[name].grad).abs().max()
        assert difference <= 1e-5 * expected[name].grad.abs().max() + 1e-7, name


def test_questions_may_have_different_numbers_of_choices(tokenizer: AlbertTokenizer) -> None:
    one_token = np.array([5], np.int32)
    examples = [
        ChoiceExample(context=one_token, choices=(one_token,) * number, target=1, length=16)
        for number in (2, 3)
    ]
    batch = collate_choices(examples, tokenizer, row_length=16)
    logits = torch.tensor([[1.0], [3.0], [4.0], [2.0], [0.0]])
    sums = choice_loss(cast("Any", None), batch, logits=lambda *_: logits)["multiple-choice"]
    losses = [math.log(math.exp(1 - 3) + 1), math.log(math.exp(4 - 2) + 1 + math.exp(0 - 2))]
    assert float(sums.loss) == pytest.approx(sum(losses), rel=1e-6)
    assert (int(sums.right), sums.count) == (1, 2)


def test_losses_of_pairs_in_both_orders_match_values_by_hand() -> None:
    """Four pairs have log-odds of "in order". The fifth pair is padding. Ties are not right."""
    in_order, swapped = [2.0, -1.0, 3.0, 0.0], [-2.0, -3.0, 3.0, 1.5]
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
    sums = dict(paired_order_loss(cast("Any", None), batch, logits=lambda *_: logits))
    pairs = list(zip(in_order, swapped, strict=True))
    paired = [math.log1p(math.exp((b - a) / 2)) for a, b in pairs]
    unpaired = [math.log1p(math.exp(-a)) + math.log1p(math.exp(b)) for a, b in pairs]
    assert float(sums["paired-order"].loss) == pytest.approx(sum(paired), rel=1e-6)
    assert float(sums["sentence-order"].loss) == pytest.approx(sum(unpaired), rel=1e-6)
    assert (int(sums["paired-order"].right), sums["paired-order"].count) == (2, 4)
    assert (int(sums["sentence-order"].right), sums["sentence-order"].count) == (4, 8)
