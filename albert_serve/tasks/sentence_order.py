"""Sentence order: the probability that one text follows another, and coherence scores.

The head is the pretraining head (Lan et al. 2019, section 3.1, "Inter-sentence coherence loss"):
label 0 means "in order", and label 1 "swapped". `docs/tasks.md` explains the scores.

Shape legend: N sentences, P pairs of them, 2 labels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from albert_serve.api.schemas import (
    Coherence,
    Order,
    PairOrder,
    SentenceOrderAnswer,
    SentenceOrderParameters,
    Sentences,
    TextPair,
)
from albert_serve.errors import InvalidInputError
from albert_serve.tasks.base import (
    ENTRY_BYTES,
    EncoderInput,
    Logits,
    Prepared,
    TaskSetup,
    log_softmax,
    softmax,
)
from albert_serve.tasks.truncation import Truncator, prefix_errors
from albert_serve.tokenizer import Encoding


@dataclass(frozen=True, slots=True)
class SentenceOrder:
    """The task that scores pairs of texts, and lists of sentences."""

    setup: TaskSetup

    def prepare(
        self, item: TextPair | Sentences, parameters: SentenceOrderParameters
    ) -> Prepared[SentenceOrderAnswer]:
        """Encode one pair, or each pair of neighbouring sentences in a list."""
        truncator = Truncator(self.setup.tokenizer, self.setup.max_positions, parameters.truncation)
        if isinstance(item, Sentences):
            return _prepare_sentences(item.sentences, truncator)
        fitted = truncator.fit(
            _encode(truncator, item.text, "text"), _encode(truncator, item.text_pair, "text_pair")
        )
        return Prepared(
            inputs=[fitted.cls_input("sentence-order")],
            finish=_finish_pair,
            num_truncated=fitted.num_truncated,
        )


def _prepare_sentences(
    sentences: Sequence[str], truncator: Truncator
) -> Prepared[SentenceOrderAnswer]:
    pairs = list(pairwise(range(len(sentences))))
    encoded = [
        _encode(truncator, sentence, f"sentences[{number}]")
        for number, sentence in enumerate(sentences)
    ]
    inputs: list[EncoderInput] = []
    num_truncated = 0
    for first, second in pairs:
        with prefix_errors(f"sentences[{first}] and sentences[{second}] together"):
            fitted = truncator.fit(encoded[first], encoded[second])
        inputs.append(fitted.cls_input("sentence-order"))
        num_truncated += fitted.num_truncated
    return Prepared(
        inputs=inputs,
        finish=lambda logits: _finish_coherence(pairs, np.concatenate(logits)),
        num_truncated=num_truncated,
        answer_bytes=len(pairs) * ENTRY_BYTES,
    )


def _encode(truncator: Truncator, text: str, name: str) -> Encoding:
    with prefix_errors(name):
        encoding = truncator.encode(text)
    if not text.strip() or not len(encoding):
        raise InvalidInputError(f"{name} is empty. Send a text with at least one word.")
    return encoding


def _finish_pair(logits: list[Logits]) -> Order:
    return Order(in_order=float(softmax(logits[0][0])[0]))


def _finish_coherence(pairs: Sequence[tuple[int, int]], logits_P2: Logits) -> Coherence:
    scored = [
        PairOrder(first=first, second=second, in_order=float(probability))
        for (first, second), probability in zip(pairs, softmax(logits_P2)[:, 0], strict=True)
    ]
    return Coherence(pairs=scored, coherence=math.exp(log_softmax(logits_P2)[:, 0].mean()))
