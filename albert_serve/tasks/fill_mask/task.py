"""Fill-mask: the likeliest tokens for each [MASK] of a text.

Scores and sequences are those of `transformers`' pipeline. The masks of one text are scored
independently. A target of several pieces is scored by its first piece, unless its whole score is
requested (`target_scoring.py`).

Shape legend: R masks, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from albert_serve.api.schemas import (
    AnyFillMaskAnswer,
    FilledToken,
    FillMaskAnswer,
    FillMaskParameters,
    Truncation,
)
from albert_serve.errors import NoMaskError, TextTooLongError
from albert_serve.tasks.base import ENTRY_BYTES, Logits, Prepared, TaskSetup
from albert_serve.tasks.fill_mask.masks import MaskedText
from albert_serve.tasks.fill_mask.target_scoring import score_targets
from albert_serve.tasks.fill_mask.targets import read_first_pieces, read_whole
from albert_serve.tasks.probability import best, softmax
from albert_serve.tasks.truncation import FittedEncoding, Truncator

# The approximate text of a token.
_BYTES_PER_TOKEN: Final = 8


@dataclass(frozen=True, slots=True)
class FillMask:
    """Fills masks with tokens of the vocabulary."""

    setup: TaskSetup

    def prepare(self, item: str, parameters: FillMaskParameters) -> Prepared[AnyFillMaskAnswer]:
        """Encode one text.

        The answer is a list for one mask, or a list for each of several masks.

        Raises:
            NoMaskError: the text has no mask, or none before the cut.
            InvalidInputError: the targets cannot be scored, or there are too many masks or targets.
            TextTooLongError: the text does not fit and may not be truncated.
        """
        tokenizer, top_k = self.setup.tokenizer, parameters.top_k
        listed = () if parameters.targets is None else parameters.targets
        targets = (listed,) if isinstance(listed, str) else tuple(listed)
        pieces = read_whole(tokenizer, targets) if parameters.multi_token_targets else ()
        fitted = self._fit(item, parameters.truncation, max(map(len, pieces), default=1) - 1)
        text = self._find_masks(fitted)
        warnings: Sequence[str] = ()
        prepared: Prepared[AnyFillMaskAnswer]
        if pieces:
            prepared = score_targets(text, pieces, top_k)
        else:
            # An embedding may have rows that the vocabulary has no token for.
            candidates = np.arange(tokenizer.vocab_size)
            if targets:
                candidates, warnings = read_first_pieces(tokenizer, targets)
            prepared = _fill_each(text, candidates, top_k)
        # The scores of all whole targets are held until they are ranked.
        num_choices = len(pieces) or min(top_k, len(targets) or top_k)
        # Each entry of an answer contains the whole text.
        entry_bytes = ENTRY_BYTES + _BYTES_PER_TOKEN * len(text.ids)
        return replace(
            prepared,
            num_truncated=fitted.num_truncated,
            cuts=fitted.cuts(""),
            warnings=list(warnings),
            answer_bytes=len(text.masks) * num_choices * entry_bytes,
        )

    def _fit(self, text: str, truncation: Truncation, num_more: int) -> FittedEncoding:
        """Fit the text, and leave room for `num_more` further masks."""
        max_positions = self.setup.max_positions
        truncator = Truncator(self.setup.tokenizer, max_positions, truncation)
        encoding = truncator.encode(text)
        fitted = truncator.fit(encoding)
        num_tokens = len(fitted.encoding) + num_more
        if num_tokens <= max_positions:
            return fitted
        if truncation == "error" or num_more > max_positions // 2:
            raise TextTooLongError(
                f"with the longest target, of {num_more + 1} pieces, the text is {num_tokens} "
                f"tokens, and the model reads at most {max_positions}; shorten either"
                + (", or set the parameter truncation to true" if truncation == "error" else "")
            )
        return replace(truncator, max_positions=max_positions - num_more).fit(encoding)

    def _find_masks(self, fitted: FittedEncoding) -> MaskedText:
        tokenizer, ids = self.setup.tokenizer, fitted.encoding.ids
        masks = [i for i, token in enumerate(ids) if token == tokenizer.mask_id]
        if masks:
            return MaskedText(tokenizer, ids, masks)
        mask = tokenizer.mask_token
        if fitted.num_truncated:
            raise NoMaskError(
                f"no {mask} in the first {len(ids)} tokens, which are all that are read; "
                f"{fitted.num_truncated} were cut off; shorten the text before the {mask}"
            )
        raise NoMaskError(f"the text has no {mask}; write {mask} where a token is to be filled in")


def _fill_each(
    text: MaskedText, candidates: NDArray[np.int64], top_k: int
) -> Prepared[FillMaskAnswer]:
    """Return the input of a text whose masks are filled independently, and its answer.

    Args:
        candidates: the ids that a mask may be filled with.
        top_k: the number of fillings of each mask.
    """

    def filled(mask: int, token: int, score: float) -> FilledToken:
        return FilledToken(
            score=score,
            token=token,
            token_str=text.write_pieces([token]),
            sequence=text.write(mask, [token]),
        )

    def finish(logits: Sequence[Logits]) -> FillMaskAnswer:
        (logits_RV,) = logits
        answers = [
            [
                filled(mask, token, float(probabilities_V[token]))
                for token in best(probabilities_V, candidates, top_k)
            ]
            for probabilities_V, mask in zip(softmax(logits_RV), text.masks, strict=True)
        ]
        return answers[0] if len(answers) == 1 else answers

    return Prepared(inputs=[text.reading(text.ids, text.masks)], finish=finish)
