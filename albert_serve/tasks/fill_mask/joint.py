"""Joint filling of all masks of a text by beam search.

Filled independently, two masks may get the beginning of one answer and the end of another: "New"
and "Angeles". Here each round fills the mask whose best token is the most probable, and the model
reads the text again with it. A beam keeps the likeliest partial fillings; each of them chooses its
own next mask. A filling's score is the product of the probabilities of its tokens when they were
filled in: by the chain rule, the model's probability of all of them on that path.

Shape legend: R masks left, V vocabulary.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from albert_serve.api.schemas import FilledMasks
from albert_serve.errors import InvalidInputError
from albert_serve.tasks.base import Logits, Round
from albert_serve.tasks.fill_mask.masks import MaskedText
from albert_serve.tasks.probability import best, log_softmax

MAX_MASKS: Final = 16
# Wide enough to keep the likeliest filling if its first token is not the likeliest.
_MIN_BEAM_WIDTH: Final = 8


def beam_width(top_k: int) -> int:
    """Return the number of partial fillings that are kept to answer `top_k`."""
    return max(top_k, _MIN_BEAM_WIDTH)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Filling:
    """A text with some of its masks filled.

    Attributes:
        left: positions of the masks that are not filled.
        log_score: sum of the log probabilities of the filled tokens.
    """

    ids: tuple[int, ...]
    left: tuple[int, ...]
    log_score: float


def fill_jointly(
    text: MaskedText, candidates: NDArray[np.int64], top_k: int
) -> Round[list[FilledMasks]]:
    """Return the first round of a text whose masks are filled together, one round for each.

    Args:
        candidates: the ids that a mask may be filled with.
        top_k: the number of fillings to return.

    Raises:
        InvalidInputError: the text has too many masks.
    """
    if len(text.masks) > MAX_MASKS:
        raise InvalidInputError(
            f"the text has {len(text.masks)} masks; joint fills at most {MAX_MASKS} together: "
            "split the text, or leave joint out"
        )
    width = beam_width(top_k)

    def read(beam: Sequence[_Filling]) -> Round[list[FilledMasks]]:
        return Round(
            inputs=[text.reading(filling.ids, filling.left) for filling in beam],
            finish=lambda logits: follow(beam, logits),
        )

    def follow(
        beam: Sequence[_Filling], logits: Sequence[Logits]
    ) -> list[FilledMasks] | Round[list[FilledMasks]]:
        grown: dict[tuple[int, ...], _Filling] = {}
        for filling, logits_RV in zip(beam, logits, strict=True):
            for longer in _grow(filling, logits_RV, candidates, width):
                # Of two paths to the same tokens the likelier one counts.
                known = grown.setdefault(longer.ids, longer)
                if longer.log_score > known.log_score:
                    grown[longer.ids] = longer
        beam = heapq.nsmallest(
            width, grown.values(), key=lambda filling: (-filling.log_score, filling.ids)
        )
        if beam[0].left:
            return read(beam)
        return [_answer(text, filling) for filling in beam[:top_k]]

    return read([_Filling(ids=tuple(text.ids), left=tuple(text.masks), log_score=0.0)])


def _grow(
    filling: _Filling, logits_RV: Logits, candidates: NDArray[np.int64], width: int
) -> Iterator[_Filling]:
    """Yield the filling with its surest mask filled by each of the likeliest tokens."""
    logs_RV = log_softmax(logits_RV)
    row = int(logs_RV[:, candidates].max(axis=1).argmax())
    place = filling.left[row]
    for token in best(logs_RV[row], candidates, width):
        yield _Filling(
            ids=(*filling.ids[:place], token, *filling.ids[place + 1 :]),
            left=(*filling.left[:row], *filling.left[row + 1 :]),
            log_score=filling.log_score + float(logs_RV[row, token]),
        )


def _answer(text: MaskedText, filling: _Filling) -> FilledMasks:
    tokens = [filling.ids[mask] for mask in text.masks]
    return FilledMasks(
        score=math.exp(filling.log_score),
        tokens=tokens,
        token_strs=[text.write_pieces([token]) for token in tokens],
        sequence=text.decode(filling.ids, keep_special=False),
    )
