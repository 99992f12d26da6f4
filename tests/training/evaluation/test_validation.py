"""Held-out text is asked about in the same way each time, and sentence order in both orders."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.training.support import TINY, make_part, make_shards, our_model, randomize
from training.data.batch import PretrainBatch, pad
from training.data.examples import IGNORED, Example, ExampleSettings, build_examples
from training.data.masking import NgramMasking
from training.data.shards import Shard, Shards
from training.loop.validation import measure
from training.losses import Objective
from training.model.heads import AlbertForTasks, Task, head_sizes
from training.tasks.pretraining.loss import pretrain_loss
from training.tasks.pretraining.metrics import held_out, order_metrics, unigram_entropy

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
    assert (
        sum(batch.counts["sentence-order"] for batch in batches)
        == sum(labels.values()) - labels[IGNORED]
    )


LOSSES = {"pretraining": pretrain_loss}


def test_measuring_has_no_dropout_and_changes_nothing() -> None:
    dropping = replace(TINY, hidden_dropout=0.5, attention_dropout=0.5, classifier_dropout=0.5)
    model, plain = our_model(dropping, BOTH).train(), our_model(TINY, BOTH)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    figures = [
        measure(Objective(each, CPU, LOSSES), all_batches(), BOTH, CPU) for each in (model, plain)
    ]
    assert figures[0] is not None
    assert figures[1] is not None
    assert {t: x.sums for t, x in figures[0].items()} == {t: x.sums for t, x in figures[1].items()}
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_compiled_objective_is_not_compiled_again() -> None:
    """Held-out batches have other shapes, and no gradients."""
    model = our_model(TINY, BOTH).train()
    compiled: Counter[str] = Counter()

    def backend(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        compiled.update(["graphs"])
        return graph

    model.albert.compile(backend=backend)
    batches = all_batches(max_rows=2)
    assert measure(Objective(model, CPU, LOSSES), batches, BOTH, CPU) is not None
    assert compiled["graphs"] == 0
    pretrain_loss(model, batches[0])
    assert compiled["graphs"] > 0


def test_the_entropy_of_frequencies() -> None:
    part = make_part([[4]])
    by_hand = replace(part, tokens=np.array([7, 7, 8, 9], np.uint16))
    assert unigram_entropy(make_shards(by_hand), 50) == pytest.approx(1.5 * math.log(2))


OF_PAIRS = ExampleSettings(length=64, sentence_task="pairs", short_rate=0.0)


@pytest.fixture
def model() -> AlbertForTasks:
    torch.manual_seed(0)
    config = replace(TINY, vocab_size=800, max_positions=64)
    model = AlbertForTasks(config, head_sizes(config, ("fill-mask", "sentence-order"))).eval()
    randomize(model, seed=0)
    return model


def shards_of(documents: list[list[NDArray[np.int64]]]) -> Shards:
    sentences = [sentence for document in documents for sentence in document]
    part = Shard(
        tokens=np.concatenate(sentences).astype(np.int32),
        sentences=np.cumsum([0, *map(len, sentences)]),
        documents=np.cumsum([0, *map(len, documents)]),
    )
    return Shards(parts=(part,), tokenizer_sha256="", fingerprint="")


@torch.no_grad()
def test_figures_are_those_of_each_pair_alone(model: AlbertForTasks, shards: Shards) -> None:
    figures = order_metrics(model, shards, replace(OF_PAIRS, sentence_task="sop"), "fp32")
    odds = odds_of(model, shards, OF_PAIRS)
    in_order, swapped = np.array(odds).T
    assert figures["sentence_order_pairs"] == len(odds) > 100
    losses = np.log1p(np.exp([-in_order, swapped]))
    assert figures["sentence_order_loss"] == pytest.approx(losses.mean(), rel=1e-4)
    right = np.array([in_order > 0, swapped < 0]).mean()
    assert figures["sentence_order_accuracy"] == pytest.approx(right)
    paired = (in_order > swapped).mean()
    assert figures["sentence_order_paired_accuracy"] == pytest.approx(paired)
    single = odds_of(model, shards, replace(OF_PAIRS, single_sentences=True))
    in_order, swapped = np.array(single).T
    assert figures["single_sentence_order_pairs"] == len(single) > 20
    right = np.array([in_order > 0, swapped < 0]).mean()
    assert figures["single_sentence_order_accuracy"] == pytest.approx(right)


def odds_of(model: AlbertForTasks, shards: Shards, settings: ExampleSettings) -> list[list[float]]:
    """The log-odds of each pair in order, and swapped."""
    odds: list[list[float]] = []
    for number, part in enumerate(shards.parts):
        examples = build_examples(part, settings, seed=12345, epoch=0, number=number)
        for a, b, c, d in examples.bounds.tolist():
            odds.append([])
            for bounds in ((a, b, c, d), (c, d, a, b)):
                ids, second = Example(0, 0, 0, bounds, 0).tokens(part)
                types = (np.arange(len(ids)) >= second).astype(int)
                hidden = model(pad([(ids.tolist(), types.tolist())]))
                logits = model.logits("sentence-order", hidden[:, 0])[0]
                odds[-1].append(float(logits[0] - logits[1]))
    return odds


def test_without_pairs_there_is_no_figure(model: AlbertForTasks) -> None:
    alone = shards_of([[np.arange(5, 12)], [np.arange(7, 20)]])
    figures = order_metrics(model, alone, OF_PAIRS)
    assert figures.pop("sentence_order_pairs") == 0
    assert figures.pop("single_sentence_order_pairs") == 0
    assert all(math.isnan(value) for value in figures.values())
