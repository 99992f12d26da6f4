"""What a run gave, and its numbers as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from albert_serve.config import AlbertConfig
from benchmarks.engines.contest import Process, Result, kind_of
from benchmarks.engines.contestants import BASELINE, CONTESTANTS
from benchmarks.engines.figures import Difference, difference, forward_flops
from benchmarks.engines.inputs import Inputs
from benchmarks.engines.jobs import QUESTIONS, Peak, Shape, Turn


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a run gave.

    Attributes:
        machine: hardware and versions, a line each.
        results: in the order of the tables.
        peaks: by case, one a round.
        others: CPUs that other programs used during turns; None where that is not known.
        disk: bytes of each form of the model, by task and form.
        guesses: whether answers to questions are a random head's: chance, not to be compared.
        notes: what a reader has to know besides; who is missing, and why.
    """

    machine: Sequence[str]
    num_threads: int
    config: AlbertConfig
    num_labels: int
    inputs: Inputs
    results: Sequence[Result]
    peaks: Mapping[str, Sequence[Peak]]
    others: float | None
    disk: Mapping[str, int]
    guesses: bool
    notes: Sequence[str]

    @property
    def shapes(self) -> list[str]:
        """The cases that are shapes."""
        return [case for case in self.peaks if kind_of(case) == "shapes"]

    def find(self, key: str) -> Result | None:
        """A contestant's result, where it has one."""
        found = [one for one in self.results if one.contestant is CONTESTANTS[key] and one.turns]
        return found[0] if found else None

    def flops(self, shape: str) -> float:
        """Floating-point operations of a call."""
        return forward_flops(self.config, Shape.parse(shape), self.num_labels)

    def disk_bytes(self, process: Process) -> int:
        """Of the files that a process reads, its tokenizer not counted."""
        return self.disk[form_key(process.job.task, process.job.variant.form)]

    def reference(self, result: Result, case: str) -> list[Any] | None:
        """The baseline's first answers to the items that the contestant answers, if there are."""
        base = self.find(BASELINE)
        if base is None or case not in base.turns or (case == QUESTIONS and self.guesses):
            return None
        outputs = base.turns[case][0].outputs
        if kind_of(case) == "shapes":
            return outputs
        return [outputs[index] for index in self.inputs.indices(case, result.contestant.part)]

    def differences(self, result: Result) -> dict[str, Difference]:
        """From the baseline's first probabilities, by case; shapes and texts."""
        return {
            case: difference(turns[0].outputs, reference)
            for case, turns in result.turns.items()
            if case != QUESTIONS and (reference := self.reference(result, case)) is not None
        }

    def to_dict(self) -> dict[str, Any]:
        """All numbers, single turns included."""
        return {
            "machine": list(self.machine),
            "notes": list(self.notes),
            "others_cpus": self.others,
            "text_lengths": self.inputs.text_lengths,
            "question_lengths": self.inputs.question_lengths,
            "flops": {shape: self.flops(shape) for shape in self.shapes},
            "peaks": {case: [asdict(one) for one in peaks] for case, peaks in self.peaks.items()},
            "disk_bytes": dict(self.disk),
            "contestants": [self._result(result) for result in self.results],
        }

    def _result(self, result: Result) -> dict[str, Any]:
        differences = self.differences(result).items()
        return {
            "name": result.contestant.name,
            "ways": dict(result.ways),
            "batch_sizes": dict(result.batch_sizes),
            "turns": {
                case: [_turn(turn) for turn in turns] for case, turns in result.turns.items()
            },
            "differences": {case: asdict(apart) for case, apart in differences},
            "processes": [_process(process) for process in result.processes],
            "failures": list(result.failures),
        }


def form_key(task: str, form: str) -> str:
    """How a form of the model is called in results."""
    return f"{task}/{form}"


def _turn(turn: Turn) -> dict[str, Any]:
    return {name: value for name, value in asdict(turn).items() if name != "outputs"}


def _process(process: Process) -> dict[str, Any]:
    return {
        "name": process.job.name,
        "task": process.job.task,
        "form": process.job.variant.form,
        **asdict(process.opened),
        **asdict(process.memory),
    }
