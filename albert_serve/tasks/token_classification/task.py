"""Token classification: the entities in a text, such as names, with their positions.

A text of any length is read in overlapping windows, whose logits are merged (`tasks/windows.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from albert_serve.api.schemas import (
    ClassifiedToken,
    EntityGroup,
    TokenClassificationAnswer,
    TokenClassificationParameters,
)
from albert_serve.bundle.weights import TOKENS
from albert_serve.errors import InvalidInputError
from albert_serve.tasks.base import ENTRY_BYTES, EncoderInput, Logits, Prepared, TaskSetup, softmax
from albert_serve.tasks.text_classification import label_names
from albert_serve.tasks.token_classification.entities import aggregate, find_words, join
from albert_serve.tasks.windows import Windows, make_windows
from albert_serve.tokenizer import Encoding

# A window is surrounded by [CLS] and [SEP].
_NUM_SPECIAL: Final = 2
_DEFAULT_STRIDE: Final = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowedText:
    """A text that is encoded in windows.

    Attributes:
        inputs: encoder input of each window, of which the head reads the rows of the text's tokens.
        encoding: tokens of the text.
    """

    text: str
    inputs: list[EncoderInput]
    encoding: Encoding
    windows: Windows

    @property
    def words(self) -> list[range]:
        """The tokens of each word."""
        return find_words(self.text, self.encoding.offsets)

    def scores(self, logits: Sequence[Logits]) -> NDArray[np.float64]:
        """Return the label probabilities of each token (N, K)."""
        return softmax(self.windows.stitch(logits))


@dataclass(frozen=True, slots=True)
class TokenClassification:
    """The task that finds entities in texts of any length."""

    setup: TaskSetup

    def prepare(
        self, item: str, parameters: TokenClassificationParameters
    ) -> Prepared[TokenClassificationAnswer]:
        """Encode one text, as one input per window."""
        windowed = self.split(item, parameters.stride)
        return Prepared(
            inputs=windowed.inputs,
            finish=lambda logits: self._finish(windowed, logits, parameters),
            answer_bytes=ENTRY_BYTES * len(windowed.encoding),
        )

    def split(self, text: str, stride: int | None = None) -> WindowedText:
        """Encode one text, and split it into windows."""
        tokenizer = self.setup.tokenizer
        encoding = tokenizer.encode_plain(text)
        if not text.strip() or not len(encoding):
            raise InvalidInputError("text is empty. Send a text with at least one word.")
        window_size = self.setup.max_positions - _NUM_SPECIAL
        if stride is not None and stride > window_size // 2:
            raise InvalidInputError(
                f"stride is {stride}, but windows of {window_size} tokens share at most "
                f"{window_size // 2}. Lower stride."
            )
        overlap = min(_DEFAULT_STRIDE, window_size // 2) if stride is None else stride
        windows = make_windows(len(encoding), window_size, overlap, num_before=0)
        inputs = []
        for start, end in windows.ranges:
            built = tokenizer.build(encoding.slice(start, end))
            rows = list(range(1, 1 + end - start))
            inputs.append(EncoderInput(ids=built.ids, types=built.types, task=TOKENS, rows=rows))
        return WindowedText(text=text, inputs=inputs, encoding=encoding, windows=windows)

    @property
    def labels(self) -> list[str]:
        """The names of the labels."""
        return label_names(self.setup.head)

    def _finish(
        self,
        windowed: WindowedText,
        logits: list[Logits],
        parameters: TokenClassificationParameters,
    ) -> TokenClassificationAnswer:
        text, offsets = windowed.text, windowed.encoding.offsets
        strategy, ignored = parameters.aggregation_strategy, set(parameters.ignore_labels)
        units = aggregate(windowed.scores(logits), self.labels, offsets, windowed.words, strategy)
        if strategy != "none":
            return [
                EntityGroup(
                    entity_group=entity.label,
                    score=entity.score,
                    word=text[entity.start : entity.end],
                    start=entity.start,
                    end=entity.end,
                )
                for entity in join(units)
                if entity.label not in ignored
            ]
        return [
            ClassifiedToken(
                entity=unit.label,
                score=unit.score,
                index=index,
                word=self._piece(windowed, index - 1),
                start=unit.start,
                end=unit.end,
            )
            for index, unit in enumerate(units, start=1)
            if unit.label not in ignored
        ]

    def _piece(self, windowed: WindowedText, index: int) -> str:
        """Return a token as the vocabulary writes it, or its characters if it is unknown."""
        token_id, (start, end) = windowed.encoding.ids[index], windowed.encoding.offsets[index]
        tokenizer = self.setup.tokenizer
        return (
            windowed.text[start:end] if token_id == tokenizer.unk_id else tokenizer.token(token_id)
        )
