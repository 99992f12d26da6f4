"""Fill-mask: the most probable tokens for each [MASK] of a text.

Scores and sequences equal `transformers`' pipeline. The masks of a text are scored independently. A
target of several pieces is scored by its first piece.

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

# Approximate memory of the text of a token.
_BYTES_PER_TOKEN: Final = 8
_MAX_WARNINGS: Final = 20
# All texts of a request have the same targets, which are parsed once. The cache is small, because
# its keys keep tokenizers in memory.
_CACHE_SIZE: Final = 8


@dataclass(frozen=True, slots=True)
class FillMask:
    """The task that fills masks with tokens of the vocabulary."""

    setup: TaskSetup

    def prepare(self, item: str, parameters: FillMaskParameters) -> Prepared[FillMaskAnswer]:
        """Encode one text.

        For one mask, the answer is a list of tokens. For several masks, it is a list of such lists.
        """
        tokenizer, targets = self.setup.tokenizer, parameters.targets
        # Only tokens are candidates: the model's embedding may have more rows than the vocabulary.
        candidates: NDArray[np.int64] = np.arange(tokenizer.vocab_size)
        warnings: Sequence[str] = ()
        if targets is not None:
            words = (targets,) if isinstance(targets, str) else tuple(targets)
            candidates, warnings = _read_targets(tokenizer, words)
        truncator = Truncator(tokenizer, self.setup.max_positions, parameters.truncation)
        fitted = truncator.fit_texts(item)
        text = _MaskedText(tokenizer, fitted.encoding.ids, self._find_masks(fitted))
        # Each entry of an answer contains the whole text.
        entry_bytes = ENTRY_BYTES + _BYTES_PER_TOKEN * len(text.ids)
        num_entries = len(text.masks) * min(parameters.top_k, len(candidates))
        return Prepared(
            inputs=[fitted.input_for_rows("fill-mask", text.masks)],
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
                f"The first {len(ids)} tokens have no {mask}, and {fitted.num_truncated} tokens "
                f"were truncated. Shorten the text before the {mask}."
            )
        raise NoMaskError(f"The text has no {mask}. Write {mask} in place of the missing token.")


@dataclass(frozen=True, slots=True)
class _MaskedText:
    """An encoded text and its masks.

    Attributes:
        ids: token ids, including special tokens.
        masks: positions of [MASK], at least one.
    """

    tokenizer: AlbertTokenizer
    ids: list[int]
    masks: list[int]

    def fill(self, logits_RV: Logits, candidates: NDArray[np.int64], top_k: int) -> FillMaskAnswer:
        """Return the best fillings of the mask, or a list of them for each of several masks.

        Args:
            candidates: ids of the tokens to choose from.
            top_k: number of fillings per mask.
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
        ids = [*self.ids[:mask], token, *self.ids[mask + 1 :]]
        visible_ids = [token_id for token_id in ids if token_id != self.tokenizer.pad_id]
        return FilledToken(
            score=score,
            token=token,
            token_str=self.tokenizer.decode([token], keep_special=True),
            # Other masks must stay visible, and the decoder keeps all special tokens or none.
            sequence=self.tokenizer.decode(visible_ids, keep_special=len(self.masks) > 1),
        )


@lru_cache(_CACHE_SIZE)
def _read_targets(
    tokenizer: AlbertTokenizer, targets: tuple[str, ...]
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Return one id for each target, without duplicates, as `transformers`' pipeline does.

    A target should be a piece as the vocabulary writes it. Any other target is replaced by its
    first piece, or skipped if it has no piece.

    Returns:
        The ids, in the order of the targets, and warnings for the caller.
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
            "None of the targets contains a token. Use words that can replace the mask."
        )
    if len(warnings) > _MAX_WARNINGS:  # the header of the warnings has a size limit
        last = f"The same applies to {len(warnings) - _MAX_WARNINGS} more targets."
        warnings = [*warnings[:_MAX_WARNINGS], last]
    return np.array(list(ids), dtype=np.int64), tuple(warnings)


def _explain(tokenizer: AlbertTokenizer, target: str, pieces: Sequence[int]) -> str:
    fault = f"The target {shorten(target)} is not in the vocabulary."
    if not pieces:
        return f"{fault} It has no token and was ignored."
    first = tokenizer.token(pieces[0])
    # A lone "▁" is only the space before a word, so it is skipped.
    visible_pieces = (piece for piece in pieces if tokenizer.surface(tokenizer.token(piece)))
    is_unknown = next(visible_pieces, tokenizer.unk_id) == tokenizer.unk_id
    limitation = ", which says nothing about the target" if is_unknown else ""
    return f"{fault} Its first piece {first!r} was scored{limitation}."
