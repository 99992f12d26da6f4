"""Held-out text is asked about in the same way each time, without changing what is measured."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.training.support import TINY, make_part, make_shards, our_model
from training.data.batch import PretrainBatch
from training.data.examples import IGNORED, ExampleSettings, build_examples
from training.data.masking import NgramMasking
from training.data.shards import Shards
from training.evaluation.validation import held_out, measure, unigram_entropy
from training.losses import Objective, pretrain_loss
from training.model.heads import Task

CPU = torch.device("cpu")
BOTH: tuple[Task, ...] = ("fill-mask", "sentence-order")
MASKING = NgramMasking(word_starts=np.ones(TINY.vocab_size, bool))
SETTINGS = ExampleSettings(length=16)
SHARDS = make_shards(
    make_part([[6, 7], [3, 2], [4, 9]] * 8, TINY.vocab_size),
    make_part([[5, 5], [6, 1, 6], [30]] * 8, TINY.vocab_size),
)


def all_batches(**changes: Any) -> list[PretrainBatch]:
    return list(held_out(SHARDS, MASKING, SETTINGS, **changes))


def test_every_example_is_validated_once() -> None:
    batches = all_batches()
    labels: Counter[int] = Counter()
    sizes = 0
    for number, part in enumerate(SHARDS.parts):
        built = build_examples(part, SETTINGS, seed=12345, epoch=0, number=number)
        labels.update(built.labels.tolist())
        sizes += int(built.sizes.sum())
    label_counts = Counter(label for batch in batches for label in batch.labels.tolist())
    assert {label: label_counts[label] for label in (0, 1)} == {
        label: labels[label] for label in (0, 1)
    }
    assert sum(batch.num_tokens for batch in batches) == sizes
    assert sum(batch.num_pairs for batch in batches) == sum(labels.values()) - labels[IGNORED]


def test_measuring_has_no_dropout_and_changes_nothing() -> None:
    dropping = replace(TINY, hidden_dropout=0.5, attention_dropout=0.5, classifier_dropout=0.5)
    model, plain = our_model(dropping, BOTH).train(), our_model(TINY, BOTH)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    figures = [measure(Objective(each, CPU), all_batches(), BOTH, CPU) for each in (model, plain)]
    assert figures[0] is not None
    assert figures[1] is not None
    assert {t: x.sums for t, x in figures[0].items()} == {t: x.sums for t, x in figures[1].items()}
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_should_stop_interrupts_the_validation() -> None:
    model = our_model(TINY, BOTH).train()
    batches = 5 * all_batches()
    calls: Counter[str] = Counter()
    model.albert.register_forward_hook(lambda *_: calls.update(["batches"]))

    def stop_after(number: int) -> Callable[[], bool]:
        calls.clear()
        return lambda: calls["batches"] >= number

    for number in (0, 3):
        stop = stop_after(number)
        assert measure(Objective(model, CPU), batches, BOTH, CPU, should_stop=stop) is None
        assert calls["batches"] == number
        assert model.training
    stop = stop_after(len(batches))
    assert measure(Objective(model, CPU), batches, BOTH, CPU, should_stop=stop) is not None


def test_a_compiled_objective_is_not_compiled_again() -> None:
    """Held-out batches have other shapes, and no gradients."""
    model = our_model(TINY, BOTH).train()
    compiled: Counter[str] = Counter()

    def backend(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        compiled.update(["graphs"])
        return graph

    model.albert.compile(backend=backend)
    batches = all_batches(max_rows=2)
    assert measure(Objective(model, CPU), batches, BOTH, CPU) is not None
    assert compiled["graphs"] == 0
    pretrain_loss(model, batches[0])
    assert compiled["graphs"] > 0


def loss_of_frequencies(shards: Shards) -> float:
    """The mean of -log p over all tokens, p being their frequencies."""
    tokens = np.concatenate([part.tokens for part in shards.parts]).tolist()
    counts = Counter(tokens)
    return -sum(math.log(counts[token] / len(tokens)) for token in tokens) / len(tokens)


def test_the_entropy_of_frequencies() -> None:
    part = make_part([[4]])
    by_hand = replace(part, tokens=np.array([7, 7, 8, 9], np.uint16))
    assert unigram_entropy(make_shards(by_hand), 50) == pytest.approx(1.5 * math.log(2))
    assert unigram_entropy(SHARDS, TINY.vocab_size) == pytest.approx(loss_of_frequencies(SHARDS))
