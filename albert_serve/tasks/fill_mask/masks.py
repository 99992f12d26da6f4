"""An encoded text with masks, common to all ways of filling them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from albert_serve.tasks.base import EncoderInput
from albert_serve.tokenizer import AlbertTokenizer


@dataclass(frozen=True, slots=True)
class MaskedText:
    """An encoded text and its masks.

    Attributes:
        ids: with the special tokens.
        masks: positions of [MASK], at least one.
    """

    tokenizer: AlbertTokenizer
    ids: list[int]
    masks: list[int]

    def reading(self, ids: Sequence[int], rows: Sequence[int]) -> EncoderInput:
        """Return the encoder input of a variant of this text, with these gathered positions."""
        return EncoderInput(ids=list(ids), types=[0] * len(ids), task="fill-mask", rows=list(rows))

    def replaced(self, mask: int, pieces: Sequence[int]) -> list[int]:
        """Return the ids with `pieces` in place of the mask at this position."""
        return [*self.ids[:mask], *pieces, *self.ids[mask + 1 :]]

    def write(self, mask: int, pieces: Sequence[int]) -> str:
        """Return the decoded text with `pieces` in place of the mask at this position."""
        # Other masks must stay visible, and the decoder keeps either all special tokens or none.
        return self.decode(self.replaced(mask, pieces), keep_special=len(self.masks) > 1)

    def decode(self, ids: Sequence[int], *, keep_special: bool) -> str:
        """Return a variant of this text, decoded without padding."""
        shown = [token for token in ids if token != self.tokenizer.pad_id]
        return self.tokenizer.decode(shown, keep_special=keep_special)

    def write_pieces(self, pieces: Sequence[int]) -> str:
        """Return the decoded pieces."""
        return self.tokenizer.decode(pieces, keep_special=True)
