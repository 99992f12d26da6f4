"""The rounds of a request's items until their answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from albert_serve.tasks.base import EncoderInput, Logits, Round


class Work:
    """The encoder inputs of some items, round after round, until all have answers.

        work = Work(prepared)
        while work.inputs:
            work.take(engine.run(work.inputs))
        return work.answers

    Attributes:
        inputs: the next inputs of all items together; empty when all answers are complete.
    """

    def __init__(self, rounds: Sequence[Round[Any]]) -> None:
        self._stages: list[Any] = list(rounds)
        self.inputs = self._gather()

    def take(self, logits: Sequence[Logits]) -> None:
        """Process the logits of `inputs`, in order.

        Raises:
            EngineError: a logit is not finite.
        """
        rest = iter(logits)
        for number, stage in enumerate(self._stages):
            if isinstance(stage, Round):
                self._stages[number] = stage.finish([next(rest) for _ in stage.inputs])
        self.inputs = self._gather()

    @property
    def answers(self) -> list[Any]:
        """One answer for each item, in order."""
        assert not self.inputs, "there is more to run"
        return self._stages

    def _gather(self) -> list[EncoderInput]:
        return [item for stage in self._stages if isinstance(stage, Round) for item in stage.inputs]
