"""Fill-mask: the likeliest tokens for each [MASK] of a text.

Scores and sequences are those of `transformers`' pipeline. The masks of one text are scored
independently, and a target of several pieces by its first piece.

Shape legend: R masks, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from albert_serve.api.schemas import FilledToken, FillMaskAnswer, FillMaskParameters
from albert_serve.api.wire import shorten
from albert_serve.errors import InvalidInputError, NoMaskError
from albert_serve.tasks.base import ENTRY_BYTES, Logits, Prepared, TaskSetup, best, softmax
from albert_serve.tasks.truncation import FittedEncoding, Truncator
from albert_serve.tokenizer import AlbertTokenizer

# The approximate text of a token.
_BYTES_PER_TOKEN: Final = 8
_MAX_WARNINGS: Final = 20
# All texts of a request have the same targets, which are parsed once. The cache is small because
# its keys keep their tokenizers alive.
_CACHE_SIZE: Final = 8


@dataclass(frozen=True, slots=True)
class FillMask:
    """Fills masks with tokens of the vocabulary."""

    setup: TaskSetup

    def prepare(self, item: str, parameters: FillMaskParameters) -> Prepared[FillMaskAnswer]:
        """Encode one text.

        The answer is a list for one mask, or a list for each of several masks.
        """
        tokenizer, targets = self.setup.tokenizer, parameters.targets
        # An embedding may have rows that the vocabulary has no token for.
        candidates: NDArray[np.int64] = np.arange(tokenizer.vocab_size)
        warnings: Sequence[str] = ()
        if targets is not None:
            listed = (targets,) if isinstance(targets, str) else tuple(targets)
            candidates, warnings = _read_targets(tokenizer, listed)
        truncator = Truncator(tokenizer, self.setup.max_positions, parameters.truncation)
        fitted = truncator.fit_texts(item)
        text = _MaskedText(tokenizer, fitted.encoding.ids, self._find_masks(fitted))
        # Each entry of an answer contains the whole text.
        entry_bytes = ENTRY_BYTES + _BYTES_PER_TOKEN * len(text.ids)
        num_entries = len(text.masks) * min(parameters.top_k, len(candidates))
        return Prepared(
            inputs=[fitted.at("fill-mask", text.masks)],
            finish=lambda logits: text.fill(logits[0], candidates, parameters.top_k),
            num_truncated=fitted.num_truncated,
            warnings=list(warnings),
            answer_bytes=num_entries * entry_bytes,
        )

    def _find_masks(self, fitted: FittedEncoding) -> list[int]:
        tokenizer, ids = self.setup.tokenizer, fitted.encoding.ids
        masks = [i for i, token in enumerate(ids) if token == tokenizer.mask_id]
        if masks:
            return masks
        mask = tokenizer.mask_token
        if fitted.num_truncated:
            raise NoMaskError(
                f"no {mask} in the first {len(ids)} tokens, which are all that are read; "
                f"{fitted.num_truncated} were cut off; shorten the text before the {mask}"
            )
        raise NoMaskError(f"the text has no {mask}; write {mask} where a token is to be filled in")


@dataclass(frozen=True, slots=True)
class _MaskedText:
    """An encoded text and its masks.

    Attributes:
        ids: with the special tokens.
        masks: positions of [MASK], at least one.
    """

    tokenizer: AlbertTokenizer
    ids: list[int]
    masks: list[int]

    def fill(self, logits_RV: Logits, candidates: NDArray[np.int64], top_k: int) -> FillMaskAnswer:
        """Return the best fillings of the mask, or a list of them for each of several masks.

        Args:
            candidates: the ids that a mask may be filled with.
            top_k: the number of fillings of each mask.
        """
        answers = [
            [
                self._filled(mask, token, float(probabilities_V[token]))
                for token in best(probabilities_V, candidates, top_k)
            ]
            for probabilities_V, mask in zip(softmax(logits_RV), self.masks, strict=True)
        ]
        return answers[0] if len(answers) == 1 else answers

    def _filled(self, mask: int, token: int, score: float) -> FilledToken:
        filled = [*self.ids[:mask], token, *self.ids[mask + 1 :]]
        shown = [each for each in filled if each != self.tokenizer.pad_id]
        return FilledToken(
            score=score,
            token=token,
            token_str=self.tokenizer.decode([token], keep_special=True),
            # Other masks must stay visible, and the decoder keeps either all special tokens or
            # none.
            sequence=self.tokenizer.decode(shown, keep_special=len(self.masks) > 1),
        )


@lru_cache(_CACHE_SIZE)
def _read_targets(
    tokenizer: AlbertTokenizer, targets: tuple[str, ...]
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Return one id for each target, without duplicates, as `transformers`' pipeline does.

    A target that is a piece of the vocabulary, in its notation, is that piece; any other target is
    represented by its first piece, and skipped if it has none.

    Returns:
        The ids, in the targets' order, and warnings for the caller.
    """
    ids: dict[int, None] = {}
    warnings: list[str] = []
    for target in targets:
        token = tokenizer.token_id(target)
        pieces = tokenizer.encode_plain(target).ids
        if token is None:
            warnings.append(_explain(tokenizer, target, pieces))
            token = pieces[0] if pieces else None
        if token is not None:
            ids[token] = None
    if not ids:
        raise InvalidInputError(
            "none of the targets stands for any token; name words that a mask could stand for"
        )
    if len(warnings) > _MAX_WARNINGS:  # they are sent in a header, whose size is limited
        rest = f"and so for {len(warnings) - _MAX_WARNINGS} further targets"
        warnings = [*warnings[:_MAX_WARNINGS], rest]
    return np.array(list(ids), dtype=np.int64), tuple(warnings)


def _explain(tokenizer: AlbertTokenizer, target: str, pieces: Sequence[int]) -> str:
    missing = f"the target {shorten(target)} is not in the vocabulary"
    if not pieces:
        return f"{missing} and stands for nothing; it was passed over"
    first = tokenizer.token(pieces[0])
    # A lone "▁" is the space before a word, and does not identify it.
    telling = (piece for piece in pieces if tokenizer.surface(tokenizer.token(piece)))
    warning = f"{missing}; its first piece {first!r} was scored"
    is_unknown = next(telling, tokenizer.unk_id) == tokenizer.unk_id
    return f"{warning}, which says nothing of it" if is_unknown else warning
