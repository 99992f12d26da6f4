"""Results of a run: derived figures, and all numbers as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from albert_serve.config import AlbertConfig
from benchmarks.engines.contest import Process, Result, kind_of
from benchmarks.engines.inputs import Inputs
from benchmarks.engines.jobs import BASELINE, CONTESTANTS, QUESTIONS, Peak, Shape, Turn


def forward_flops(config: AlbertConfig, shape: Shape, num_labels: int) -> float:
    """Floating-point operations of the matrix products of encoder and classifier.

    2 for each multiplication with its addition, of which there are

        E*H + L * (4H² + 2HF)    a token: `num_compute_weights` without its output layer over the
                                 vocabulary and its pooler, which a token of this model has not
        L * 2S²H                 a sequence: the attention's scores and sums
        H² + HK                  a sequence: pooler and K labels

    Lookups, norms, activations and softmax are not counted.
    """
    hidden = config.hidden_size
    per_token = (
        config.num_compute_weights - config.vocab_size * config.embedding_size - hidden * hidden
    )
    attention = len(config.layer_plan) * 2 * shape.length**2 * hidden
    per_row = shape.length * per_token + attention + hidden * hidden + hidden * num_labels
    return 2.0 * shape.num_rows * per_row


def median_seconds(turns: Sequence[Turn]) -> float:
    """Figures of one call or pass, over rounds."""
    return statistics.median(turn.seconds for turn in turns)


def median_rate(turns: Sequence[Turn]) -> float:
    """Items a second, over rounds."""
    return statistics.median(turn.items_per_s for turn in turns)


def speed_ratio(
    turns: Sequence[Turn],
    others: Sequence[Turn],
    rate: Callable[[Turn], float] = lambda turn: turn.items_per_s,
) -> float:
    """Return the speed-up of the first turns: the median of the ratios of each round.

    What else the machine does changes less within a round than between rounds.
    """
    pairs = zip(turns, others, strict=True)
    return statistics.median(rate(one) / rate(other) for one, other in pairs)


def part_of_peak(turns: Sequence[Turn], peaks: Sequence[Peak], flops: float) -> float:
    """Speed of a call as a part of the fp32 products' in the same round, the median over rounds."""
    pairs = zip(turns, peaks, strict=True)
    return statistics.median(flops / turn.seconds / peak.fp32 for turn, peak in pairs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The difference of probabilities from the reference's.

    Attributes:
        largest: absolute, of all labels and items.
        relative: root mean square, as a part of how much the reference's vary over the items; an
            answer that does not depend on the text would have 1.
        same_label: part of the items whose most probable label is the reference's.
        num_items: number of compared items.
    """

    largest: float
    relative: float
    same_label: float
    num_items: int


def difference(
    outputs: Sequence[Sequence[float]], reference: Sequence[Sequence[float]]
) -> Difference:
    """Compare probabilities (N, K) of the same items."""
    given_NK, right_NK = np.array(outputs), np.array(reference)
    apart_NK = given_NK - right_NK
    spread = spread_of(reference)
    rms = float(np.sqrt((apart_NK**2).mean()))
    return Difference(
        largest=float(np.abs(apart_NK).max()),
        relative=rms / spread if spread else float("inf") if rms else 0.0,
        same_label=float((given_NK.argmax(1) == right_NK.argmax(1)).mean()),
        num_items=len(given_NK),
    )


def spread_of(outputs: Sequence[Sequence[float]]) -> float:
    """Standard deviation of the probabilities (N, K) over the items."""
    return float(np.array(outputs).std(axis=0).mean())


def same_answers(outputs: Sequence[str], reference: Sequence[str]) -> float:
    """Part of the answers that are the reference's, white space around them aside."""
    pairs = zip(outputs, reference, strict=True)
    return statistics.fmean(one.strip() == other.strip() for one, other in pairs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The results of a run.

    Attributes:
        machine: hardware and versions, a line each.
        results: in the order of the tables.
        peaks: by case, one a round.
        others: CPUs that other programs used during turns; None where that is not known.
        disk: bytes of each form of the model, by task and form.
        guesses: whether answers to questions are a random head's: chance, not to be compared.
        notes: remarks for the reader, such as the missing contestants with the reason.
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
        results = [one for one in self.results if one.contestant is CONTESTANTS[key] and one.turns]
        return results[0] if results else None

    def flops(self, shape: str) -> float:
        """Floating-point operations of a call."""
        return forward_flops(self.config, Shape.parse(shape), self.num_labels)

    def disk_bytes(self, process: Process) -> int:
        """Return the size of the files that a process reads, without its tokenizer."""
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
        """Return the differences from the baseline's first probabilities, by case."""
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
            "differences": {case: asdict(one) for case, one in differences},
            "processes": [_process(process) for process in result.processes],
            "failures": list(result.failures),
        }


def form_key(task: str, form: str) -> str:
    """Return the name of a form of the model in results."""
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
