"""The items of a request on their way to their answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from albert_serve.tasks.base import EncoderInput, Logits, Round


class Work:
    """What the engine has to run for some items, round after round, until all have answers.

        work = Work(prepared)
        while work.inputs:
            work.take(engine.run(work.inputs))
        return work.answers

    Attributes:
        inputs: what is to be run next, for all items together; empty once there are answers.
    """

    def __init__(self, rounds: Sequence[Round[Any]]) -> None:
        self._stages: list[Any] = list(rounds)
        self.inputs = self._gather()

    def take(self, logits: Sequence[Logits]) -> None:
        """Go on with the logits of `inputs`, in order.

        Raises:
            EngineError: they are not finite.
        """
        rest = iter(logits)
        for number, stage in enumerate(self._stages):
            if isinstance(stage, Round):
                self._stages[number] = stage.finish([next(rest) for _ in stage.inputs])
        self.inputs = self._gather()

    @property
    def answers(self) -> list[Any]:
        """One for each item, in order."""
        assert not self.inputs, "there is more to run"
        return self._stages

    def _gather(self) -> list[EncoderInput]:
        return [
            given for stage in self._stages if isinstance(stage, Round) for given in stage.inputs
        ]
