"""Sentence order: the probability that the second text follows the first.

Read by the head that pretraining leaves behind (Lan et al. 2019, section 3.1, "Inter-sentence
coherence loss"): label 0 in order, label 1 swapped.
"""

from __future__ import annotations

from dataclasses import dataclass

from albert_serve.errors import InvalidInputError
from albert_serve.schemas import Order, SentenceOrderParameters, TextPair
from albert_serve.tasks.base import Logits, Prepared
from albert_serve.tasks.fitting import fit
from albert_serve.tasks.probability import softmax
from albert_serve.tokenizer import AlbertTokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class SentenceOrder:
    """Scores pairs of texts."""

    tokenizer: AlbertTokenizer
    max_positions: int

    def prepare(self, item: TextPair, parameters: SentenceOrderParameters) -> Prepared[Order]:
        """Encode one pair.

        Raises:
            InvalidInputError: a text is empty.
            TextTooLongError: the pair does not fit and may not be truncated.
        """
        for name, text in (("text", item.text), ("text_pair", item.text_pair)):
            if not text.strip():
                raise InvalidInputError(f"{name} is empty; only two texts can have an order")
        fitted = fit(
            self.tokenizer,
            item.text,
            item.text_pair,
            max_positions=self.max_positions,
            truncation=parameters.truncation,
        )
        return Prepared(
            inputs=[fitted.at_cls("sentence-order")],
            finish=_finish,
            num_truncated=fitted.num_truncated,
        )


def _finish(logits: list[Logits]) -> Order:
    return Order(in_order=float(softmax(logits[0][0])[0]))
