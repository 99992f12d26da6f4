"""Scores of whole targets with several pieces.

A target of k pieces replaces the mask by k masks. Its score is the product of the probabilities of
its pieces, from left to right, each with the pieces before it filled in and the rest masked:

    P(w1 | [MASK] [MASK] [MASK]) * P(w2 | w1 [MASK] [MASK]) * P(w3 | w1 w2 [MASK])

All pieces are known, so all readings are computed together. A target of one piece has the same
score as in a plain request. Scores are not normalised by the number of pieces.

Shape legend: R rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Final, NamedTuple

from albert_serve.api.schemas import FilledTarget, TargetsAnswer
from albert_serve.errors import InvalidInputError
from albert_serve.tasks.base import Logits, Prepared
from albert_serve.tasks.fill_mask.masks import MaskedText
from albert_serve.tasks.probability import log_softmax

_MAX_READINGS: Final = 256


class _Step(NamedTuple):
    """One piece of a target: its probability is at a position of a reading of the text."""

    ids: tuple[int, ...]
    place: int
    token: int


def score_targets(
    text: MaskedText, targets: Sequence[tuple[int, ...]], top_k: int
) -> Prepared[TargetsAnswer]:
    """Return the inputs of targets, by their pieces; the answer is as `FillMaskAnswer`.

    Raises:
        InvalidInputError: the targets need too many readings of the text.
    """
    readings: dict[tuple[int, ...], list[int]] = {}  # the positions of each that are read
    for mask, target in product(text.masks, targets):
        for step in _steps(text, mask, target):
            places = readings.setdefault(step.ids, [])
            if step.place not in places:
                places.append(step.place)
        if len(readings) > _MAX_READINGS:
            raise InvalidInputError(
                f"the pieces of these targets would take over {_MAX_READINGS} readings of the "
                "text; send fewer or shorter targets at once"
            )

    def finish(logits: Sequence[Logits]) -> TargetsAnswer:
        logs = {
            (ids, place): logs_V
            for (ids, places), logits_RV in zip(readings.items(), logits, strict=True)
            for place, logs_V in zip(places, log_softmax(logits_RV), strict=True)
        }
        answers = []
        for mask in text.masks:
            scores = {
                target: math.exp(
                    sum(
                        float(logs[ids, place][token])
                        for ids, place, token in _steps(text, mask, target)
                    )
                )
                for target in targets
            }
            ranked = sorted(scores, key=lambda target: (-scores[target], target))
            answers.append([_filled(text, mask, each, scores[each]) for each in ranked[:top_k]])
        return answers[0] if len(answers) == 1 else answers

    inputs = [text.reading(ids, places) for ids, places in readings.items()]
    return Prepared(inputs=inputs, finish=finish)


def _steps(text: MaskedText, mask: int, target: tuple[int, ...]) -> Iterator[_Step]:
    for number, token in enumerate(target):
        masked = [text.tokenizer.mask_id] * (len(target) - number)
        ids = tuple(text.replaced(mask, [*target[:number], *masked]))
        yield _Step(ids=ids, place=mask + number, token=token)


def _filled(text: MaskedText, mask: int, target: tuple[int, ...], score: float) -> FilledTarget:
    return FilledTarget(
        score=score,
        token=target[0],
        tokens=list(target),
        token_str=text.write_pieces(target),
        sequence=text.write(mask, target),
    )
