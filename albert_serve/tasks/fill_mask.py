"""Fill-mask: the likeliest tokens for each [MASK] of a text.

Scores and sequences are those of `transformers`' pipeline. The masks of one text are scored
independently of each other.

Shape legend: R masks, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from albert_serve.errors import InvalidInputError, NoMaskError
from albert_serve.schemas import FilledToken, FillMaskAnswer, FillMaskParameters
from albert_serve.tasks.base import EncoderInput, Logits, Prepared
from albert_serve.tasks.fitting import Fitted, fit
from albert_serve.tasks.probability import softmax
from albert_serve.tokenizer import AlbertTokenizer

_MAX_WARNINGS: Final = 20
_MAX_CHARS_TOLD: Final = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class FillMask:
    """Fills masks from one vocabulary."""

    tokenizer: AlbertTokenizer
    max_positions: int

    def prepare(self, item: str, parameters: FillMaskParameters) -> Prepared[FillMaskAnswer]:
        """Encode one text; the answer is a list for one mask, a list for each mask otherwise.

        Raises:
            NoMaskError: no mask, or none before the cut.
            InvalidInputError: a target stands for no token.
            TextTooLongError: the text does not fit and may not be truncated.
        """
        fitted = fit(
            self.tokenizer,
            item,
            None,
            max_positions=self.max_positions,
            truncation=parameters.truncation,
        )
        ids = fitted.encoding.ids
        masks = [i for i, token in enumerate(ids) if token == self.tokenizer.mask_id]
        if not masks:
            raise NoMaskError(self._explain_no_mask(fitted))
        targets, warnings = self._read_targets(parameters.targets)
        return Prepared(
            inputs=[
                EncoderInput(ids=ids, types=fitted.encoding.types, task="fill-mask", rows=masks)
            ],
            finish=lambda logits: self._finish(logits[0], ids, masks, targets, parameters.top_k),
            num_truncated=fitted.num_truncated,
            warnings=warnings,
        )

    def _explain_no_mask(self, fitted: Fitted) -> str:
        mask = self.tokenizer.mask_token
        if fitted.num_truncated:
            return (
                f"no {mask} in the first {self.max_positions} tokens, which are all that the model "
                f"reads; {fitted.num_truncated} were cut off; shorten the text before the {mask}"
            )
        return f"the text has no {mask}; write {mask} where a token is to be filled in"

    def _read_targets(
        self, targets: str | list[str] | None
    ) -> tuple[NDArray[np.int64] | None, list[str]]:
        """The ids to score, each once, in the caller's order; and what the caller should know."""
        if targets is None:
            return None, []
        ids: dict[int, None] = {}
        warnings: list[str] = []
        for target in [targets] if isinstance(targets, str) else targets:
            pieces = self.tokenizer.encode_plain(target).ids
            token = self.tokenizer.token_id(target)
            if token is None:
                token = self._first_piece(target, pieces)
                warnings.append(
                    f"the target {_shorten(target)} is not in the vocabulary; its first piece "
                    f"{self.tokenizer.token(token)!r} was scored"
                )
            ids[token] = None
        if len(warnings) > _MAX_WARNINGS:  # they travel in a header, which has a limit
            rest = f"and so for {len(warnings) - _MAX_WARNINGS} further targets"
            warnings = [*warnings[:_MAX_WARNINGS], rest]
        return np.array(list(ids), dtype=np.int64), warnings

    def _first_piece(self, target: str, pieces: list[int]) -> int:
        # The space before a word, which alone says nothing of it.
        telling = [piece for piece in pieces if self.tokenizer.token(piece) != "▁"]
        if not telling or self.tokenizer.token(telling[0]) == "<unk>":
            raise InvalidInputError(
                f"the target {_shorten(target)} begins with nothing that the vocabulary knows; "
                "leave it out or choose another word"
            )
        return pieces[0]

    def _finish(
        self,
        logits: Logits,
        ids: list[int],
        masks: list[int],
        targets: NDArray[np.int64] | None,
        top_k: int,
    ) -> FillMaskAnswer:
        candidates = np.arange(logits.shape[1]) if targets is None else targets
        answers = [
            [
                self._filled(ids, mask, token, float(shares[token]))
                for token in _best(shares, candidates, top_k)
            ]
            for shares, mask in zip(softmax(logits), masks, strict=True)
        ]
        return answers[0] if len(answers) == 1 else answers

    def _filled(self, ids: list[int], mask: int, token: int, score: float) -> FilledToken:
        sequence = [*ids[:mask], token, *ids[mask + 1 :]]
        return FilledToken(
            score=score,
            token=token,
            token_str=self.tokenizer.decode([token], keep_special=True),
            sequence=self.tokenizer.decode(
                [given for given in sequence if given != self.tokenizer.pad_id],
                # Other masks must stay to be seen, and with them all special tokens do.
                keep_special=ids.count(self.tokenizer.mask_id) > 1,
            ),
        )


def _shorten(target: str) -> str:
    short = target[:_MAX_CHARS_TOLD]
    return repr(short) if short == target else f"{short!r}..."


def _best(shares: NDArray[np.float64], candidates: NDArray[np.int64], top_k: int) -> list[int]:
    """The `top_k` likeliest candidates, likeliest first; the smaller id first of equals."""
    shares = shares[candidates]
    if top_k < len(candidates):
        within = np.argpartition(-shares, top_k - 1)[:top_k]
        candidates, shares = candidates[within], shares[within]
    order = np.lexsort((candidates, -shares))
    return [int(candidate) for candidate in candidates[order]]
