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
from albert_serve.errors import NoMaskError, TextTooLongError
from albert_serve.tasks.base import ENTRY_BYTES, Logits, Prepared, Round, TaskSetup
from albert_serve.tasks.fill_mask.joint import JointFilling, beam_width
from albert_serve.tasks.fill_mask.masks import MaskedText
from albert_serve.tasks.fill_mask.target_scoring import TargetScoring
from albert_serve.tasks.fill_mask.targets import read_first_pieces, read_whole
from albert_serve.tasks.probability import best, softmax
from albert_serve.tasks.truncation import Fitted, encode, fit_encodings
from albert_serve.tokenizer import AlbertTokenizer

# The approximate text of a token.
_BYTES_PER_TOKEN: Final = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class FillMask:
    """Fills masks with tokens of the vocabulary."""

    tokenizer: AlbertTokenizer
    max_positions: int

    @classmethod
    def open(cls, setup: TaskSetup) -> FillMask:
        """Return the task for a model."""
        return cls(tokenizer=setup.tokenizer, max_positions=setup.max_positions)

    def prepare(self, item: str, parameters: FillMaskParameters) -> Prepared[AnyFillMaskAnswer]:
        """Encode one text.

        The answer is a list for one mask, or a list for each of several masks; with joint filling
        it is one list of fillings.

        Raises:
            NoMaskError: the text has no mask, or none before the cut.
            InvalidInputError: the targets cannot be scored, or there are too many masks or targets.
            TextTooLongError: the text does not fit and may not be truncated.
        """
        listed = () if parameters.targets is None else parameters.targets
        targets = (listed,) if isinstance(listed, str) else tuple(listed)
        pieces = read_whole(self.tokenizer, targets) if parameters.multi_token_targets else ()
        fitted = self._fit(item, parameters.truncation, max(map(len, pieces), default=1) - 1)
        text = self._find_masks(fitted)
        warnings: Sequence[str] = ()
        first: Round[AnyFillMaskAnswer]
        if pieces:
            first = TargetScoring(text=text, targets=pieces, top_k=parameters.top_k).start()
        else:
            candidates = None
            if targets:
                candidates, warnings = read_first_pieces(self.tokenizer, targets)
            kind = JointFilling if parameters.joint else _Filling
            first = kind(text=text, candidates=candidates, top_k=parameters.top_k).start()
        # Of whole targets all are held until they are ranked.
        num_choices = len(pieces) or min(parameters.top_k, len(targets) or parameters.top_k)
        # Each entry of an answer contains the whole text.
        entry_bytes = ENTRY_BYTES + _BYTES_PER_TOKEN * len(text.ids)
        return Prepared(
            inputs=first.inputs,
            finish=first.finish,
            num_truncated=fitted.num_truncated,
            cuts=fitted.cuts(""),
            warnings=list(warnings),
            num_vocabulary_rows=_num_rows(first, text, parameters),
            answer_bytes=len(text.masks) * num_choices * entry_bytes,
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


def _num_rows(
    first: Round[AnyFillMaskAnswer], text: MaskedText, parameters: FillMaskParameters
) -> int:
    """Return an upper bound of the rows of logits in the widest round."""
    num_rows = sum(len(item.rows or ()) for item in first.inputs)
    if not parameters.joint:
        return num_rows
    return max(num_rows, beam_width(parameters.top_k) * (len(text.masks) - 1))


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
