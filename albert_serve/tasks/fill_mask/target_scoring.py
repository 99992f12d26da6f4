"""Scores of whole targets with several pieces.

A target of k pieces replaces the mask by k masks. Its score is the product of the probabilities of
its pieces, from left to right, each with the pieces before it filled in and the rest masked:

    P(w1 | [MASK] [MASK] [MASK]) * P(w2 | w1 [MASK] [MASK]) * P(w3 | w1 w2 [MASK])

As the pieces are known, one round is enough. A target of one piece has the same score as in a plain
request. Scores are not normalised by the number of pieces.

Shape legend: R rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final, NamedTuple

from albert_serve.api.schemas import FilledTarget, TargetsAnswer
from albert_serve.errors import InvalidInputError
from albert_serve.tasks.base import Logits, Round
from albert_serve.tasks.fill_mask.masks import MaskedText
from albert_serve.tasks.probability import log_softmax

_MAX_READINGS: Final = 256


class _Step(NamedTuple):
    """One piece of a target: its probability is at a position of a reading of the text."""

    ids: tuple[int, ...]
    place: int
    token: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetScoring:
    """Scores targets at each mask of one text; other masks stay masks.

    Attributes:
        targets: the pieces of each.
        top_k: the number of targets to return for each mask.
    """

    text: MaskedText
    targets: Sequence[tuple[int, ...]]
    top_k: int

    def start(self) -> Round[TargetsAnswer]:
        """Return the only round; its answer is a list, or a list for each of several masks.

        Raises:
            InvalidInputError: the targets need too many readings of the text.
        """
        readings: dict[tuple[int, ...], list[int]] = {}  # the positions of each that are read
        for mask, target in product(self.text.masks, self.targets):
            for step in self._steps(mask, target):
                places = readings.setdefault(step.ids, [])
                if step.place not in places:
                    places.append(step.place)
            if len(readings) > _MAX_READINGS:
                raise InvalidInputError(
                    f"the pieces of these targets would take over {_MAX_READINGS} readings of the "
                    "text; send fewer or shorter targets at once"
                )
        return Round(
            inputs=[self.text.reading(ids, places) for ids, places in readings.items()],
            finish=lambda logits: self._finish(readings, logits),
        )

    def _steps(self, mask: int, target: tuple[int, ...]) -> Iterator[_Step]:
        for number, token in enumerate(target):
            masked = [self.text.tokenizer.mask_id] * (len(target) - number)
            ids = tuple(self.text.replaced(mask, [*target[:number], *masked]))
            yield _Step(ids=ids, place=mask + number, token=token)

    def _finish(
        self, readings: Mapping[tuple[int, ...], list[int]], logits: Sequence[Logits]
    ) -> TargetsAnswer:
        logs = {
            (ids, place): logs_V
            for (ids, places), logits_RV in zip(readings.items(), logits, strict=True)
            for place, logs_V in zip(places, log_softmax(logits_RV), strict=True)
        }
        answers = []
        for mask in self.text.masks:
            scores = [
                math.exp(sum(float(logs[ids, place][token]) for ids, place, token in steps))
                for steps in (self._steps(mask, target) for target in self.targets)
            ]
            answers.append(self._best(mask, scores))
        return answers[0] if len(answers) == 1 else answers

    def _best(self, mask: int, scores: Sequence[float]) -> list[FilledTarget]:
        ranked = sorted(
            zip(self.targets, scores, strict=True), key=lambda scored: (-scored[1], scored[0])
        )
        return [
            FilledTarget(
                score=score,
                token=target[0],
                tokens=list(target),
                token_str=self.text.write_pieces(target),
                sequence=self.text.write(mask, target),
            )
            for target, score in ranked[: self.top_k]
        ]
