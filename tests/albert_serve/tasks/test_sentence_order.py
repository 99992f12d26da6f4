"""Sentence order against the head that `transformers` reads from the same checkpoint, and
coherence against its definition."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from albert_serve.api.schemas import SentenceOrderParameters, Sentences, TextPair
from albert_serve.errors import TextTooLongError
from albert_serve.tasks import SentenceOrder, TaskSetup
from tests.albert_serve.task_fixtures import Answerer

DEFAULT = SentenceOrderParameters()


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


def test_hopeless_neighbours_leave_a_coherence_of_zero(task: SentenceOrder) -> None:
    prepared = task.prepare(Sentences(sentences=["a", "b", "c"]), DEFAULT)
    result: Any = prepared.finish([np.array([[-3e4, 3e4]], np.float32)] * 2)
    assert result.coherence == 0.0


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
