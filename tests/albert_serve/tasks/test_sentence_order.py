"""Sentence order against the head that `transformers` reads from the same checkpoint, and
coherence and order against their definitions."""

from __future__ import annotations

import math
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from albert_serve.api.schemas import MAX_REORDERED, SentenceOrderParameters, Sentences, TextPair
from albert_serve.errors import TextTooLongError
from albert_serve.tasks import SentenceOrder, TaskSetup
from albert_serve.tasks.probability import log_softmax
from albert_serve.tasks.sentence_order.ordering import MAX_EXACT, find_best_order, weigh
from tests.albert_serve.task_fixtures import Answerer

DEFAULT = SentenceOrderParameters()
REORDER = SentenceOrderParameters(reorder=True)


@pytest.fixture(scope="module")
def task(task_setup: TaskSetup) -> SentenceOrder:
    return SentenceOrder(task_setup)


@pytest.fixture(scope="module")
def texts(sentences: list[str]) -> list[str]:
    """Short enough that any two fit together."""
    return [sentence[:50] for sentence in sentences[:5]]


def in_order(task: SentenceOrder, answer: Answerer, first: str, second: str) -> float:
    share: float = answer(task.prepare(TextPair(text=first, text_pair=second), DEFAULT)).in_order
    return share


def test_the_probability_is_that_of_label_0(
    task: SentenceOrder, answer: Answerer, checkpoint_dir: Path, sentences: list[str]
) -> None:
    model = transformers.AlbertForPreTraining.from_pretrained(checkpoint_dir)
    oracle = transformers.AutoTokenizer.from_pretrained(checkpoint_dir)
    for first, second in zip(sentences[:4], sentences[4:8], strict=True):
        texts = (first[:60], second[:60])
        with torch.inference_mode():
            encoded = oracle(*texts, return_tensors="pt", return_token_type_ids=True)
            logits = model(**encoded).sop_logits[0]
        result = in_order(task, answer, *texts)
        assert result == pytest.approx(logits.softmax(-1)[0].item(), abs=1e-5)


def test_coherence_is_the_geometric_mean_of_the_neighbours(
    task: SentenceOrder, answer: Answerer, texts: list[str]
) -> None:
    result = answer(task.prepare(Sentences(sentences=texts), DEFAULT))
    expected = [in_order(task, answer, *pair) for pair in pairwise(texts)]
    assert [(pair.first, pair.second) for pair in result.pairs] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert [pair.in_order for pair in result.pairs] == pytest.approx(expected)
    assert result.coherence == pytest.approx(math.prod(expected) ** (1 / 4))
    assert set(result.model_dump()) == {"pairs", "coherence"}


def test_the_best_order_is_the_best_of_all_and_every_pair_is_returned(
    task: SentenceOrder, answer: Answerer, texts: list[str]
) -> None:
    result = answer(task.prepare(Sentences(sentences=texts), REORDER))
    in_order_by_pair = {(pair.first, pair.second): pair.in_order for pair in result.pairs}
    assert in_order_by_pair == {
        (i, j): pytest.approx(in_order(task, answer, texts[i], texts[j]))
        for i in range(5)
        for j in range(5)
        if i != j
    }
    by_order = {
        order: math.prod(in_order_by_pair[pair] for pair in pairwise(order)) ** (1 / 4)
        for order in permutations(range(5))
    }
    best = max(by_order, key=lambda order: by_order[order])
    assert tuple(result.best_order) == best
    assert result.best_coherence == pytest.approx(by_order[best])
    item = answer(task.prepare(Sentences(sentences=texts), DEFAULT))
    assert result.coherence == pytest.approx(item.coherence)


def random_weights(num_sentences: int, seed: int) -> Any:
    logits = np.random.default_rng(seed).normal(scale=3, size=(num_sentences, num_sentences, 2))
    return log_softmax(logits.astype(np.float32))[..., 0]


@given(num_sentences=st.integers(2, 6), seed=st.integers(0, 10_000))
def test_a_short_list_has_its_best_order(num_sentences: int, seed: int) -> None:
    weights = random_weights(num_sentences, seed)
    result = find_best_order(weights)
    best = max(weigh(weights, order) for order in permutations(range(num_sentences)))
    assert sorted(result) == list(range(num_sentences))
    assert weigh(weights, result) == pytest.approx(best)


@given(num_sentences=st.sampled_from([MAX_EXACT, MAX_EXACT + 1, MAX_REORDERED]), data=st.data())
@settings(max_examples=20, deadline=None)
def test_an_order_without_doubt_is_found_at_any_length(
    num_sentences: int, data: st.DataObject
) -> None:
    hidden = data.draw(st.permutations(range(num_sentences)))
    weights = np.full((num_sentences, num_sentences), -2.0)
    weights[hidden[:-1], hidden[1:]] = -0.1
    assert find_best_order(weights) == hidden


def test_equal_orders_keep_the_callers() -> None:
    for num_sentences in (2, 5, MAX_EXACT + 1):
        weights = np.full((num_sentences, num_sentences), math.log(0.5))
        assert find_best_order(weights) == list(range(num_sentences))


def test_hopeless_neighbours_leave_a_coherence_of_zero(task: SentenceOrder) -> None:
    prepared = task.prepare(Sentences(sentences=["a", "b", "c"]), REORDER)
    result: Any = prepared.finish([np.array([[-3e4, 3e4]], np.float32)] * 6)
    assert result.coherence == result.best_coherence == 0.0
    assert result.best_order == [0, 1, 2]


def test_long_sentences_are_refused_by_their_places_or_truncated(
    task: SentenceOrder, answer: Answerer
) -> None:
    sentences = Sentences(sentences=["a", "b " * 30, "c " * 45])
    with pytest.raises(TextTooLongError, match=r"^sentences\[1\] and sentences\[2\] together"):
        task.prepare(sentences, DEFAULT)
    prepared = task.prepare(sentences, SentenceOrderParameters(truncation="truncate"))
    num_tokens = [len(task.setup.tokenizer.encode_plain(text)) for text in ("b " * 30, "c " * 45)]
    assert prepared.num_truncated == sum(num_tokens) + 3 - 128
    assert 0 < answer(prepared).coherence < 1
