"""The engines' results: derived figures, tables for people, and all numbers as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from albert_serve.config import AlbertConfig
from benchmarks.engine.contest import EngineResult
from benchmarks.engine.contestants import BASELINE, CONTESTANTS, TEXTS, EngineTurn, Shape
from benchmarks.harness.page import bullets, table

_GIGA: Final = 1e9
_MEGA: Final = 1e6
_NONE: Final = "–"
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


class Difference(NamedTuple):
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
    rms, spread = float(np.sqrt((apart_NK**2).mean())), float(right_NK.std(axis=0).mean())
    return Difference(
        largest=float(np.abs(apart_NK).max()),
        relative=rms / spread if spread else float("inf") if rms else 0.0,
        same_label=float((given_NK.argmax(1) == right_NK.argmax(1)).mean()),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineReport:
    """The results of a run.

    Attributes:
        machine: hardware, versions and the model, a line each.
        lengths: tokens of the stream's texts, special ones included.
        peaks: operations a second of the plain product, by case, one a round.
        disk: bytes of each form of the model.
        notes: remarks for the reader, such as the missing contestants with the reason.
    """

    machine: Sequence[str]
    config: AlbertConfig
    num_labels: int
    lengths: Sequence[int]
    results: Sequence[EngineResult]
    peaks: Mapping[str, Sequence[float]]
    disk: Mapping[str, int]
    notes: Sequence[str]

    @property
    def shapes(self) -> list[str]:
        """The cases that are shapes."""
        return [case for case in self.peaks if case != TEXTS]

    def find(self, key: str) -> EngineResult | None:
        """A contestant's result, where it has one."""
        results = (each for each in self.results if each.contestant is CONTESTANTS[key])
        return next((each for each in results if each.turns), None)

    def flops(self, shape: str) -> float:
        """Floating-point operations of a call."""
        return forward_flops(self.config, Shape.parse(shape), self.num_labels)

    def differences(self, result: EngineResult) -> dict[str, Difference]:
        """Return the differences from the baseline's probabilities, by case."""
        base = self.find(BASELINE)
        if base is None:
            return {}
        return {
            case: difference(turns[0].outputs, base.turns[case][0].outputs)
            for case, turns in result.turns.items()
            if case in base.turns
        }

    def to_dict(self) -> dict[str, Any]:
        """All numbers, single turns included."""
        return {
            "machine": list(self.machine),
            "notes": list(self.notes),
            "text_lengths": list(self.lengths),
            "peaks": dict(self.peaks),
            "disk_bytes": dict(self.disk),
            "contestants": [self._result(result) for result in self.results],
        }

    def _result(self, result: EngineResult) -> dict[str, Any]:
        return {
            "name": result.contestant.name,
            "turns": {
                case: [{**asdict(turn), "outputs": None} for turn in turns]
                for case, turns in result.turns.items()
            },
            "differences": {
                case: each._asdict() for case, each in self.differences(result).items()
            },
            "failure": result.failure,
        }


def markdown(report: EngineReport) -> str:
    """Return all tables, the description of the machine, and the notes."""
    peaks = [one for each in report.peaks.values() for one in each]
    peak = f"plain fp32 product: {statistics.median(peaks) / _GIGA:,.0f} GFLOP/s"
    sections = [bullets([*report.machine, peak])]
    if report.shapes:
        sections += ["## Fixed shapes, rows x tokens", *_shape_tables(report)]
    if TEXTS in report.peaks:
        sections.append(_stream(report))
    sections += ["## Processes", _processes(report), "## Notes", bullets(_notes(report))]
    return "\n\n".join(sections) + "\n"


def _shape_tables(report: EngineReport) -> Iterator[str]:
    def speed(result: EngineResult, case: str) -> str:
        flops = report.flops(case)
        pairs = zip(result.turns[case], report.peaks[case], strict=True)
        part = statistics.median(flops / turn.seconds / peak for turn, peak in pairs)
        return f"{flops / _seconds(result, case) / _GIGA:,.0f} ({part:.0%})"

    cells: dict[str, Callable[[EngineResult, str], str]] = {
        "Milliseconds of a call:": lambda result, case: f"{1e3 * _seconds(result, case):,.1f}",
        "GFLOP/s, and the part of the plain fp32 product's in the same round:": speed,
    }
    for rival in _rivals(report, report.shapes[0]):
        cells[f"How many times as fast as {rival.contestant.name}:"] = partial(_ratio, rival)
    for title, cell in cells.items():
        rows = [
            [_name(one), *(cell(one, case) for case in report.shapes)]
            for one in report.results
            if report.shapes[0] in one.turns
        ]
        yield f"{title}\n\n{table(['', *report.shapes], rows)}"


def _stream(report: EngineReport) -> str:
    lengths = report.lengths
    rivals = list(_rivals(report, TEXTS))
    names = [f"times {rival.contestant.name}" for rival in rivals]
    rows = [
        [
            _name(one),
            f"{statistics.median(turn.items_per_s for turn in one.turns[TEXTS]):.2f}",
            *(_ratio(rival, one, TEXTS) for rival in rivals),
            str(one.contestant.batch_size or "own"),
            f"{one.turns[TEXTS][0].padding:.1%}",
            *_agreement(report, one),
        ]
        for one in report.results
        if TEXTS in one.turns
    ]
    headings = ["", "texts/s", *names, "batch", "padding", "largest difference"]
    return (
        f"## {len(lengths)} texts of {min(lengths)} to {max(lengths)} tokens "
        f"({statistics.fmean(lengths):.0f} on average), tokenisation included\n\n"
        f"{table([*headings, 'rms / spread', 'same label'], rows)}"
    )


def _agreement(report: EngineReport, result: EngineResult) -> list[str]:
    apart = report.differences(result).get(TEXTS)
    if apart is None:
        return [_NONE] * 3
    return [f"{apart.largest:.1e}", f"{apart.relative:.1%}", f"{apart.same_label:.0%}"]


def _processes(report: EngineReport) -> str:
    rows = []
    for result in report.results:
        if result.opening is None or not result.turns:
            continue
        memory = [*result.turns.values()][-1][-1].rss_bytes
        largest = [each.largest for each in report.differences(result).values()]
        rows.append(
            [
                _name(result),
                f"{memory / _MEGA:,.0f} MB",
                f"{result.opening.import_bytes / _MEGA:,.0f} MB",
                f"{result.opening.load_s:.2f} s",
                f"{report.disk[result.contestant.form] / _MEGA:,.1f} MB",
                f"{max(largest):.1e}" if largest else _NONE,
            ]
        )
    return table(["", "memory", "of it imports", "load", "on disk", "largest difference"], rows)


def _notes(report: EngineReport) -> Iterator[str]:
    yield from report.notes
    base = report.find(BASELINE)
    if base is not None:
        yield f"differences: from {base.contestant.name}, in probabilities"
    for result in report.results:
        if result.failure:
            yield f"{result.contestant.name}: {result.failure}"


def _rivals(report: EngineReport, case: str) -> Iterator[EngineResult]:
    for key in _COMPARED:
        rival = report.find(key)
        if rival is not None and case in rival.turns:
            yield rival


def _seconds(result: EngineResult, case: str) -> float:
    return statistics.median(turn.seconds for turn in result.turns[case])


def _ratio(rival: EngineResult, result: EngineResult, case: str) -> str:
    return f"{speed_ratio(result.turns[case], rival.turns[case]):.2f}"


def _name(result: EngineResult) -> str:
    name = result.contestant.name
    return f"**{name}**" if name.startswith("ours") else name
