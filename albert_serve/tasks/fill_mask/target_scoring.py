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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from albert_serve.api.schemas import FilledTarget, TargetsAnswer
from albert_serve.errors import InvalidInputError
from albert_serve.tasks.base import Logits, Round
from albert_serve.tasks.fill_mask.masks import MaskedText
from albert_serve.tasks.probability import log_softmax

_MAX_READINGS: Final = 256
# The limit for all targets at all masks of a text; a step takes some microseconds.
_MAX_STEPS: Final = 1 << 16
_STEP_BYTES: Final = 200


class _Step(NamedTuple):
    """One piece of a target, whose probability is at a position of one of the readings."""

    reading: int
    place: int
    token: int


# The pieces of a target at a mask.
_Steps = list[_Step]


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
            InvalidInputError: the targets exceed the limit of steps or readings.
        """
        if self._num_steps > _MAX_STEPS:
            raise InvalidInputError(
                f"the targets have {self._num_steps} pieces at all masks of the text; at most "
                f"{_MAX_STEPS} are scored: send fewer targets or masks at once"
            )
        readings: dict[tuple[int, ...], int] = {}
        plan = [
            [self._steps(mask, target, readings) for target in self.targets]
            for mask in self.text.masks
        ]
        places: list[set[int]] = [set() for _ in readings]
        for step in _all_steps(plan):
            places[step.reading].add(step.place)
        rows = [sorted(positions) for positions in places]
        return Round(
            inputs=[
                self.text.reading(ids, ids_rows)
                for ids, ids_rows in zip(readings, rows, strict=True)
            ],
            finish=lambda logits: self._finish(plan, rows, logits),
        )

    @property
    def num_answers(self) -> int:
        """Answered targets over all masks."""
        return len(self.text.masks) * min(self.top_k, len(self.targets))

    @property
    def num_step_bytes(self) -> int:
        """The memory of the steps until they are scored."""
        return self._num_steps * _STEP_BYTES

    @property
    def _num_steps(self) -> int:
        return len(self.text.masks) * sum(map(len, self.targets))

    def _steps(
        self, mask: int, target: tuple[int, ...], readings: dict[tuple[int, ...], int]
    ) -> _Steps:
        steps = []
        for number, token in enumerate(target):
            masked = [self.text.tokenizer.mask_id] * (len(target) - number)
            ids = tuple(self.text.replaced(mask, [*target[:number], *masked]))
            reading = readings.setdefault(ids, len(readings))
            steps.append(_Step(reading=reading, place=mask + number, token=token))
        if len(readings) > _MAX_READINGS:
            raise InvalidInputError(
                f"the pieces of these targets would take over {_MAX_READINGS} readings of the "
                "text; send fewer or shorter targets at once"
            )
        return steps

    def _finish(
        self, plan: Sequence[Sequence[_Steps]], rows: Sequence[list[int]], logits: Sequence[Logits]
    ) -> TargetsAnswer:
        logs: dict[_Step, float] = {}
        steps_by_reading: list[set[_Step]] = [set() for _ in rows]
        for step in _all_steps(plan):
            steps_by_reading[step.reading].add(step)
        for steps, places, logits_RV in zip(steps_by_reading, rows, logits, strict=True):
            logs_RV = log_softmax(logits_RV)
            logs |= {step: float(logs_RV[places.index(step.place), step.token]) for step in steps}
        answers = [
            self._best(mask, [math.exp(sum(logs[step] for step in steps)) for steps in targets])
            for mask, targets in zip(self.text.masks, plan, strict=True)
        ]
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


def _all_steps(plan: Sequence[Sequence[_Steps]]) -> list[_Step]:
    return [step for targets in plan for steps in targets for step in steps]
