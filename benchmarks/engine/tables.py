"""The engines' results: derived figures, tables for people, and all numbers as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from albert_serve.config import AlbertConfig
from benchmarks.engine.contest import EngineMeasurement, EngineResult
from benchmarks.engine.contestants import (
    BASELINE,
    CONTESTANTS,
    TEXTS,
    EngineTurn,
    Inputs,
    Peak,
    Shape,
)
from benchmarks.harness.page import bullets, table

_GIGA: Final = 1e9
_MEGA: Final = 1e6
_NONE: Final = "–"
# A note names contestants that use a smaller fraction of their threads' CPUs.
_IDLE: Final = 0.75
# Whose speed is compared with everybody's.
_COMPARED: Final = (BASELINE, "ours-fp32", "ours-int8")


def forward_flops(config: AlbertConfig, shape: Shape, num_labels: int) -> float:
    """Return the floating-point operations of the matrix products of encoder and classifier.

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


def speed_ratio(turns: Sequence[EngineTurn], others: Sequence[EngineTurn]) -> float:
    """Return the speed-up of the first turns: the median of the ratios of each round.

    What else the machine does changes less within a round than between rounds.
    """
    pairs = zip(turns, others, strict=True)
    return statistics.median(one.items_per_s / other.items_per_s for one, other in pairs)


def part_of_peak(turns: Sequence[EngineTurn], peaks: Sequence[Peak], flops: float) -> float:
    """Return the speed of a call as a part of the fp32 product's in the same round, the median."""
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
    """

    largest: float
    relative: float
    same_label: float


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
    )


def spread_of(outputs: Sequence[Sequence[float]]) -> float:
    """Return the standard deviation of the probabilities (N, K) over the items."""
    return float(np.array(outputs).std(axis=0).mean())


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineReport:
    """The results of a run.

    Attributes:
        machine: hardware, versions and the model, a line each.
        disk: bytes of each form of the model.
        notes: remarks for the reader, such as the missing contestants with the reason.
    """

    machine: Sequence[str]
    num_threads: int
    config: AlbertConfig
    num_labels: int
    inputs: Inputs
    measured: EngineMeasurement
    disk: Mapping[str, int]
    notes: Sequence[str]

    @property
    def shapes(self) -> list[str]:
        """The cases that are shapes."""
        return [case for case in self.measured.peaks if case != TEXTS]

    def find(self, key: str) -> EngineResult | None:
        """A contestant's result, where it has one."""
        contestant = CONTESTANTS[key]
        results = (each for each in self.measured.results if each.contestant is contestant)
        return next((each for each in results if each.turns), None)

    def flops(self, shape: str) -> float:
        """Floating-point operations of a call."""
        return forward_flops(self.config, Shape.parse(shape), self.num_labels)

    def differences(self, result: EngineResult) -> dict[str, Difference]:
        """Return the differences from the baseline's first probabilities, by case."""
        base = self.find(BASELINE)
        differences = {}
        for case, turns in result.turns.items():
            if base is None or case not in base.turns:
                continue
            reference = base.turns[case][0].outputs
            if case == TEXTS:
                indices = self.inputs.indices(result.contestant.part)
                reference = [reference[index] for index in indices]
            differences[case] = difference(turns[0].outputs, reference)
        return differences

    def to_dict(self) -> dict[str, Any]:
        """All numbers, single turns included."""
        return {
            "machine": list(self.machine),
            "notes": list(self.notes),
            "text_lengths": list(self.inputs.lengths),
            "flops": {shape: self.flops(shape) for shape in self.shapes},
            "peaks": {case: [*map(asdict, each)] for case, each in self.measured.peaks.items()},
            "disk_bytes": dict(self.disk),
            "contestants": [self._result(result) for result in self.measured.results],
        }

    def _result(self, result: EngineResult) -> dict[str, Any]:
        return {
            "name": result.contestant.name,
            "ways": result.ways,
            "batch_sizes": {case: each.batch_size for case, each in result.requests.items()},
            "turns": {
                case: [{**asdict(turn), "outputs": None} for turn in turns]
                for case, turns in result.turns.items()
            },
            "differences": {case: asdict(each) for case, each in self.differences(result).items()},
            "processes": [
                {"name": job.name, "form": job.variant.form, **asdict(opening), "rss_bytes": rss}
                for job, opening, rss in result.openings
            ],
            "failures": result.failures,
        }


def markdown(report: EngineReport) -> str:
    """Return all tables, the description of the machine, and the notes."""
    sections = [bullets([*report.machine, *_peak(report)])]
    if report.shapes:
        sections.append("\n\n".join(["## Fixed shapes, rows x tokens", *_shape_tables(report)]))
    if TEXTS in report.measured.peaks:
        sections.append(_stream(report))
    sections += ["## Processes", _processes(report), "## Notes", bullets(_notes(report))]
    return "\n\n".join(sections) + "\n"


def _peak(report: EngineReport) -> Iterator[str]:
    """Describe the peak that percentages count from."""
    peaks = [one for each in report.measured.peaks.values() for one in each]
    for name, speeds, by in (
        ("fp32", [one.fp32 for one in peaks], {one.fp32_by for one in peaks}),
        ("bf16", [one.bf16 for one in peaks], {one.bf16_by for one in peaks}),
    ):
        speed = statistics.median(speeds) / _GIGA
        if speed:  # the processor multiplies bf16
            measured = f"{speed:,.0f} GFLOP/s, median of {len(peaks)}"
            yield f"plain {name} product ({' or '.join(sorted(by))}): {measured}"


def _shape_tables(report: EngineReport) -> Iterator[str]:
    cells: dict[str, Callable[[EngineResult, str], str]] = {
        "Milliseconds of a call:": lambda result, case: f"{1e3 * _seconds(result, case):,.1f}",
        "GFLOP/s, and the part of the plain fp32 product's in the same round:": partial(
            _speed, report
        ),
    }
    for rival in _rivals(report, report.shapes):
        cells[f"How many times as fast as {rival.contestant.name}:"] = partial(_ratio, rival)
    for title, cell in cells.items():
        rows = [
            [
                _name(one),
                *(cell(one, case) if case in one.turns else _NONE for case in report.shapes),
            ]
            for one in report.measured.results
            if any(case in one.turns for case in report.shapes)
        ]
        yield f"{title}\n\n{table(['', *report.shapes], rows)}"


def _stream(report: EngineReport) -> str:
    lengths = report.inputs.lengths
    rivals = list(_rivals(report, [TEXTS]))
    names = [f"times {rival.contestant.name}" for rival in rivals]
    rows = [
        [
            _name(one),
            f"{statistics.median(turn.items_per_s for turn in one.turns[TEXTS]):.2f}",
            *(_ratio(rival, one, TEXTS) for rival in rivals),
            str(one.requests[TEXTS].batch_size or "own"),
            f"{one.turns[TEXTS][0].padding:.1%}",
            *_agreement(report, one),
        ]
        for one in report.measured.results
        if TEXTS in one.turns
    ]
    headings = ["", "texts/s", *names, "batch", "padding", "largest difference"]
    return (
        f"## {len(lengths)} texts of {min(lengths)} to {max(lengths)} tokens "
        f"({statistics.fmean(lengths):.0f} on average), tokenisation included\n\n"
        f"{table([*headings, 'rms / spread', 'same label'], rows)}"
    )


def _processes(report: EngineReport) -> str:
    """One row a process; a contestant may have several."""
    rows = []
    for result in report.measured.results:
        differences = report.differences(result)
        for job, opening, memory in result.openings:
            largest = [
                each.largest
                for case, each in differences.items()
                if result.ways.get(case) == job.variant.name
            ]
            rows.append(
                [
                    job.name,
                    f"{memory / _MEGA:,.0f} MB",
                    f"{opening.import_bytes / _MEGA:,.0f} MB",
                    f"{opening.load_s:.2f} s",
                    f"{report.disk[job.variant.form] / _MEGA:,.1f} MB",
                    f"{max(largest):.1e}" if largest else _NONE,
                ]
            )
    return table(["", "memory", "of it imports", "load", "on disk", "largest difference"], rows)


def _agreement(report: EngineReport, result: EngineResult) -> list[str]:
    found = report.differences(result).get(TEXTS)
    if found is None:
        return [_NONE] * 3
    return [f"{found.largest:.1e}", f"{found.relative:.1%}", f"{found.same_label:.0%}"]


def _notes(report: EngineReport) -> Iterator[str]:
    yield from report.notes
    base = report.find(BASELINE)
    if base is not None:
        yield f"differences: from {base.contestant.name}, in probabilities"
        if TEXTS in base.turns:
            spread = spread_of(base.turns[TEXTS][0].outputs)
            yield f"spread: standard deviation of its probabilities over the texts, {spread:.3f}"
    for result in report.measured.results:
        yield from _result_notes(report, result)


def _result_notes(report: EngineReport, result: EngineResult) -> Iterator[str]:
    name = result.contestant.name
    ways = [f"{case} {way}" for case, way in result.ways.items() if way]
    if ways:
        yield f"{name}, its fastest way: {'; '.join(ways)}"
    if result.contestant.part != "all" and result.turns:
        yield f"{name}: on a {result.contestant.part} of the texts, in order"
    used = {
        case: statistics.median(turn.cpu_seconds / turn.seconds for turn in turns)
        for case, turns in result.turns.items()
    }
    idle = {case: cpus for case, cpus in used.items() if cpus < _IDLE * report.num_threads}
    if idle:
        yield f"{name} used {min(idle.values()):.1f} CPUs or more at {', '.join(idle)}"
    for failure in result.failures:
        yield f"{name}: {failure}"


def _rivals(report: EngineReport, cases: Sequence[str]) -> Iterator[EngineResult]:
    for key in _COMPARED:
        rival = report.find(key)
        if rival is not None and any(case in rival.turns for case in cases):
            yield rival


def _seconds(result: EngineResult, case: str) -> float:
    return statistics.median(turn.seconds for turn in result.turns[case])


def _speed(report: EngineReport, result: EngineResult, case: str) -> str:
    flops = report.flops(case)
    part = part_of_peak(result.turns[case], report.measured.peaks[case], flops)
    return f"{flops / _seconds(result, case) / _GIGA:,.0f} ({part:.0%})"


def _ratio(rival: EngineResult, result: EngineResult, case: str) -> str:
    if case not in rival.turns:
        return _NONE
    return f"{speed_ratio(result.turns[case], rival.turns[case]):.2f}"


def _name(result: EngineResult) -> str:
    name = result.contestant.name
    return f"**{name}**" if name.startswith("ours") else name
