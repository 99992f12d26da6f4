"""Fill-mask: the likeliest tokens for each [MASK] of a text.

Scores and sequences are those of `transformers`' pipeline. The masks of one text are scored
independently, unless joint filling is requested (`joint.py`); a target of several pieces is scored
by its first piece, unless its whole score is requested (`target_scoring.py`).

Shape legend: R masks, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
from albert_serve.errors import NoMaskError, TextTooLongError, TooMuchAtOnceError
from albert_serve.tasks.base import ENTRY_BYTES, Logits, Prepared, Round
from albert_serve.tasks.fill_mask.joint import JointFilling
from albert_serve.tasks.fill_mask.masks import MaskedText
from albert_serve.tasks.fill_mask.target_scoring import TargetScoring
from albert_serve.tasks.fill_mask.targets import read_first_pieces, read_whole
from albert_serve.tasks.fitting import Fitted, encode, fit_encodings
from albert_serve.tasks.probability import best, softmax
from albert_serve.tokenizer import AlbertTokenizer

# The approximate text of a token.
_BYTES_PER_TOKEN: Final = 8
_MAX_CHARS_OF_TARGETS: Final = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class FillMask:
    """Fills masks with tokens of the vocabulary."""

    tokenizer: AlbertTokenizer
    max_positions: int

    def prepare(self, item: str, parameters: FillMaskParameters) -> Prepared[AnyFillMaskAnswer]:
        """Encode one text.

        The answer is a list for one mask, or a list for each of several masks; with joint filling
        it is one list of fillings.

        Raises:
            NoMaskError: the text has no mask, or none before the cut.
            InvalidInputError: the targets cannot be scored, or there are too many masks or targets.
            TextTooLongError: the text does not fit and may not be truncated.
        """
        first: Round[AnyFillMaskAnswer]
        warnings: Sequence[str] = ()
        num_round_tokens = 0
        if parameters.multi_token_targets:
            whole = read_whole(self.tokenizer, _targets(parameters))
            num_more = max(map(len, whole)) - 1
            fitted = self._fit(item, parameters.truncation, num_more)
            text = self._find_masks(fitted)
            scoring = TargetScoring(text=text, targets=whole, top_k=parameters.top_k)
            first, num_answers = scoring.start(), scoring.num_answers
            num_wide_rows = sum(len(item.rows or []) for item in first.inputs)
            num_held_bytes = scoring.num_step_bytes
        else:
            fitted = self._fit(item, parameters.truncation, num_more=0)
            text = self._find_masks(fitted)
            ids = None
            if parameters.targets is not None:
                ids, warnings = read_first_pieces(self.tokenizer, _targets(parameters))
            kind = JointFilling if parameters.joint else _Filling
            filling = kind(text=text, candidates=ids, top_k=parameters.top_k)
            first, num_wide_rows = filling.start(), filling.num_wide_rows
            num_answers, num_held_bytes = filling.num_answers, 0
            num_round_tokens = filling.num_round_tokens
        return Prepared(
            inputs=first.inputs,
            finish=first.finish,
            num_truncated=fitted.num_truncated,
            cuts=fitted.cuts(""),
            warnings=list(warnings),
            num_round_tokens=num_round_tokens,
            num_wide_rows=num_wide_rows,
            # Each answer contains the whole text.
            num_held_bytes=num_held_bytes
            + num_answers * (ENTRY_BYTES + _BYTES_PER_TOKEN * len(text.ids)),
        )

    def _fit(self, text: str, truncation: Truncation, num_more: int) -> Fitted:
        """Fit the text, and leave room for `num_more` further masks."""
        encoding = encode(self.tokenizer, text, self.max_positions, truncation)
        fitted = fit_encodings(
            self.tokenizer, encoding, None, max_positions=self.max_positions, truncation=truncation
        )
        num_tokens = len(fitted.encoding) + num_more
        if num_tokens <= self.max_positions:
            return fitted
        if truncation == "error" or num_more > self.max_positions // 2:
            raise TextTooLongError(
                f"with the longest target, of {num_more + 1} pieces, the text is {num_tokens} "
                f"tokens, and the model reads at most {self.max_positions}; shorten either"
                + (", or set the parameter truncation to true" if truncation == "error" else "")
            )
        return fit_encodings(
            self.tokenizer,
            encoding,
            None,
            max_positions=self.max_positions - num_more,
            truncation=truncation,
        )

    def _find_masks(self, fitted: Fitted) -> MaskedText:
        ids = fitted.encoding.ids
        masks = [i for i, token in enumerate(ids) if token == self.tokenizer.mask_id]
        if not masks:
            raise NoMaskError(self._explain_no_mask(fitted))
        return MaskedText(tokenizer=self.tokenizer, ids=ids, masks=masks)

    def _explain_no_mask(self, fitted: Fitted) -> str:
        mask = self.tokenizer.mask_token
        if fitted.num_truncated:
            return (
                f"no {mask} in the first {len(fitted.encoding)} tokens, which are all that are "
                f"read; {fitted.num_truncated} were cut off; shorten the text before the {mask}"
            )
        return f"the text has no {mask}; write {mask} where a token is to be filled in"


def _targets(parameters: FillMaskParameters) -> tuple[str, ...]:
    targets = parameters.targets or ()
    listed = (targets,) if isinstance(targets, str) else tuple(targets)
    num_chars = sum(map(len, listed))
    if num_chars > _MAX_CHARS_OF_TARGETS:
        raise TooMuchAtOnceError(
            f"the targets have {num_chars} characters together; at most {_MAX_CHARS_OF_TARGETS} "
            "are read at once: send fewer or shorter ones"
        )
    return listed


@dataclass(frozen=True, kw_only=True, slots=True)
class _Filling:
    """Fills each mask of one text independently.

    Attributes:
        candidates: the ids that a mask may be filled with; None for all.
        top_k: the number of tokens to return for each mask.
    """

    text: MaskedText
    candidates: NDArray[np.int64] | None
    top_k: int

    @property
    def num_wide_rows(self) -> int:
        return len(self.text.masks)

    @property
    def num_round_tokens(self) -> int:
        return len(self.text.ids)

    @property
    def num_answers(self) -> int:
        num_per_mask = self.top_k
        if self.candidates is not None:
            num_per_mask = min(num_per_mask, len(self.candidates))
        return len(self.text.masks) * num_per_mask

    def start(self) -> Round[FillMaskAnswer]:
        """Return the only round."""
        return Round(
            inputs=[self.text.reading(self.text.ids, self.text.masks)],
            finish=lambda logits: self._finish(logits[0]),
        )

    def _finish(self, logits_RV: Logits) -> FillMaskAnswer:
        candidates = np.arange(logits_RV.shape[1]) if self.candidates is None else self.candidates
        answers = [
            [
                self._filled(mask, token, float(probabilities_V[token]))
                for token in best(probabilities_V, candidates, self.top_k)
            ]
            for probabilities_V, mask in zip(softmax(logits_RV), self.text.masks, strict=True)
        ]
        return answers[0] if len(answers) == 1 else answers

    def _filled(self, mask: int, token: int, score: float) -> FilledToken:
        return FilledToken(
            score=score,
            token=token,
            token_str=self.text.write_pieces([token]),
            sequence=self.text.write(mask, [token]),
        )
