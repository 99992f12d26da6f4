"""The engines' results: derived figures, tables for people, and all numbers as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

import numpy as np

from benchmarks.engine.contestants import BASELINE, CONTESTANTS, TEXTS, Contestant, EngineTurn
from benchmarks.harness.page import bullets, table
from benchmarks.harness.process import failure_kind

_MEGA: Final = 1e6
_NONE: Final = "–"
# Whose speed is compared with everybody's.
_COMPARED: Final = (BASELINE, "ours-fp32", "ours-int8", "ours-fp16")


@dataclass(kw_only=True, slots=True)
class EngineResult:
    """The measurements of a contestant.

    Attributes:
        turns: by case, one a round; none where it failed.
        load_s: from the files to a model that can be called; imports are not counted.
        failure: why it could not go on.
    """

    contestant: Contestant
    turns: dict[str, list[EngineTurn]] = field(default_factory=dict)
    load_s: float = 0.0
    failure: str = ""


def speed_ratio(turns: Sequence[EngineTurn], others: Sequence[EngineTurn]) -> float:
    """Return the speed-up of the first turns: the median of the ratios of each round.

    What else the machine does changes less within a round than between rounds.
    """
    pairs = zip(turns, others, strict=True)
    return statistics.median(one.items_per_s / other.items_per_s for one, other in pairs)


class _Difference(NamedTuple):
    """The difference of probabilities from the reference's.

    Attributes:
        largest: absolute, of all labels and items.
        same_label: part of the items whose most probable label is the reference's.
    """

    largest: float
    same_label: float


def _difference(turn: EngineTurn, reference: EngineTurn) -> _Difference:
    given_NK, right_NK = np.array(turn.outputs), np.array(reference.outputs)
    return _Difference(
        largest=float(np.abs(given_NK - right_NK).max()),
        same_label=float((given_NK.argmax(1) == right_NK.argmax(1)).mean()),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineReport:
    """The results of a run.

    Attributes:
        machine: hardware, versions and the model, a line each.
        cases: shapes and the stream, in order.
        lengths: tokens of the stream's texts, special ones included.
        disk: bytes of each form of the model.
        notes: remarks for the reader, such as the missing contestants with the reason.
    """

    machine: Sequence[str]
    cases: Sequence[str]
    lengths: Sequence[int]
    results: Sequence[EngineResult]
    disk: Mapping[str, int]
    notes: Sequence[str]

    def find(self, key: str) -> EngineResult | None:
        """A contestant's result, where it has one."""
        results = (each for each in self.results if each.contestant.name == CONTESTANTS[key].name)
        return next((each for each in results if each.turns), None)

    def differences(self, result: EngineResult) -> dict[str, _Difference]:
        """Return the differences from the baseline's probabilities, by case."""
        base = self.find(BASELINE)
        if base is None:
            return {}
        return {
            case: _difference(turns[0], base.turns[case][0])
            for case, turns in result.turns.items()
            if case in base.turns
        }


def markdown(report: EngineReport) -> str:
    """Return all tables, the description of the machine, and the notes."""
    sections = [bullets(report.machine)]
    shapes = [case for case in report.cases if case != TEXTS]
    if shapes:
        sections += ["## Fixed shapes, rows x tokens", *_shape_tables(report, shapes)]
    if TEXTS in report.cases:
        sections.append(_stream(report))
    sections += ["## Processes", _processes(report), "## Notes", bullets(_notes(report))]
    return "\n\n".join(sections) + "\n"


def _shape_tables(report: EngineReport, shapes: Sequence[str]) -> Iterator[str]:
    def call_ms(result: EngineResult, case: str) -> str:
        return f"{1e3 * statistics.median(turn.seconds for turn in result.turns[case]):,.1f}"

    cells: dict[str, Callable[[EngineResult, str], str]] = {"Milliseconds of a call:": call_ms}
    for rival in _rivals(report, shapes[0]):
        cells[f"How many times as fast as {rival.contestant.name}:"] = partial(_ratio, rival)
    for title, cell in cells.items():
        rows = [
            [_name(one), *(cell(one, case) for case in shapes)]
            for one in report.results
            if shapes[0] in one.turns
        ]
        yield f"{title}\n\n{table(['', *shapes], rows)}"


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
            *_agreement(report, one),
        ]
        for one in report.results
        if TEXTS in one.turns
    ]
    headings = ["", "texts/s", *names, "batch", "largest difference", "same label"]
    return (
        f"## {len(lengths)} texts of {min(lengths)} to {max(lengths)} tokens "
        f"({statistics.fmean(lengths):.0f} on average), tokenisation included\n\n"
        f"{table(headings, rows)}"
    )


def _agreement(report: EngineReport, result: EngineResult) -> list[str]:
    apart = report.differences(result).get(TEXTS)
    return [_NONE] * 2 if apart is None else [f"{apart.largest:.1e}", f"{apart.same_label:.0%}"]


def _processes(report: EngineReport) -> str:
    rows = [
        [
            _name(result),
            f"{[*result.turns.values()][-1][-1].rss_bytes / _MEGA:,.0f} MB",
            f"{result.load_s:.2f} s",
            f"{report.disk[result.contestant.form] / _MEGA:,.1f} MB",
        ]
        for result in report.results
        if result.turns
    ]
    rows += [
        [_name(result), failure_kind(result.failure), "", ""]
        for result in report.results
        if result.failure
    ]
    return table(["", "memory", "load", "on disk"], rows)


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


def _ratio(rival: EngineResult, result: EngineResult, case: str) -> str:
    return f"{speed_ratio(result.turns[case], rival.turns[case]):.2f}"


def _name(result: EngineResult) -> str:
    name = result.contestant.name
    return f"**{name}**" if name.startswith("ours") else name
