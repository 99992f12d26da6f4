"""The engines' results as tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from benchmarks.engine.contestants import BASELINE, CONTESTANTS, TEXTS, Contestant, EngineTurn
from benchmarks.harness.page import bullets, median_of, ratios, table

_MEGA: Final = 1e6
# The tables compare each of these contestants with all contestants.
_OURS: Final = tuple(CONTESTANTS[key].name for key in ("ours-fp32", "ours-int8", "ours-fp16"))


@dataclass(kw_only=True, slots=True)
class EngineResult:
    """The measurements of a contestant.

    Attributes:
        turns: turns of each round by case, or empty if the contestant failed.
        load_s: seconds to open the model from its files, not counting imports.
        failure: error message if the contestant failed.
    """

    contestant: Contestant
    turns: dict[str, list[EngineTurn]] = field(default_factory=dict)
    load_s: float = 0.0
    failure: str = ""

    @property
    def title(self) -> str:
        """The contestant's name in a table, in bold if it is ours."""
        name = self.contestant.name
        return f"**{name}**" if name.startswith("ours") else name

    @property
    def texts_per_s(self) -> list[float]:
        """Number of texts of the stream per second, by round."""
        return [turn.items_per_s for turn in self.turns[TEXTS]]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineReport:
    """The results of a run.

    Attributes:
        machine: lines about hardware, versions and the model.
        cases: names of the measured cases (shapes and the stream), in order.
        lengths: number of tokens in each text of the stream, including special tokens.
        disk: size of the model in each format, in bytes.
        notes: remarks, such as skipped contestants with the reason.
    """

    machine: Sequence[str]
    cases: Sequence[str]
    lengths: Sequence[int]
    results: Sequence[EngineResult]
    disk: Mapping[str, int]
    notes: Sequence[str]

    def of_case(self, case: str) -> list[EngineResult]:
        """Return the results of the contestants that took part in a case."""
        return [result for result in self.results if case in result.turns]


def markdown(report: EngineReport) -> str:
    """Return all tables, the description of the machine, and the notes, as Markdown."""
    sections = [bullets(report.machine)]
    shapes = [case for case in report.cases if case != TEXTS]
    if shapes:
        sections += ["Milliseconds of a call, by rows x tokens:", _shapes(report, shapes)]
    if TEXTS in report.cases:
        sections += [_describe(report.lengths), _stream(report)]
    failures = [
        f"{result.contestant.name}: {result.failure}" for result in report.results if result.failure
    ]
    sections += ["Processes:", _processes(report), bullets([*report.notes, *failures])]
    return "\n\n".join(sections).rstrip() + "\n"


def _shapes(report: EngineReport, shapes: Sequence[str]) -> str:
    def call_ms(result: EngineResult, case: str) -> str:
        return f"{1e3 * statistics.median(turn.seconds for turn in result.turns[case]):,.1f}"

    rows = [
        [result.title, *(call_ms(result, case) for case in shapes)]
        for result in report.of_case(shapes[0])
    ]
    return table(["", *shapes], rows)


def _describe(lengths: Sequence[int]) -> str:
    return (
        f"{len(lengths)} texts of {min(lengths)} to {max(lengths)} tokens "
        f"({statistics.fmean(lengths):.0f} on average), tokenisation included; differences are "
        f"from the probabilities of {CONTESTANTS[BASELINE].name}:"
    )


def _stream(report: EngineReport) -> str:
    results = report.of_case(TEXTS)
    ours = [result for result in results if result.contestant.name in _OURS]
    rows = [
        [
            result.title,
            median_of(result.texts_per_s),
            *(median_of(ratios(our.texts_per_s, result.texts_per_s)) for our in ours),
            str(result.contestant.batch_size or "own"),
            *_agreement(result, results[0]),
        ]
        for result in results
    ]
    names = [f"{our.contestant.name}, times as fast" for our in ours]
    return table(["", "texts/s", *names, "batch", "largest difference", "same label"], rows)


def _agreement(result: EngineResult, base: EngineResult) -> Iterator[str]:
    """Yield the largest difference from the baseline's probabilities, and how many labels agree."""
    if base.contestant.name == CONTESTANTS[BASELINE].name:
        probs_NK, base_NK = (np.array(side.turns[TEXTS][0].outputs) for side in (result, base))
        yield f"{np.abs(probs_NK - base_NK).max():.1e}"
        yield f"{(probs_NK.argmax(1) == base_NK.argmax(1)).mean():.0%}"
    else:
        yield from ("", "")


def _processes(report: EngineReport) -> str:
    rows = [
        [
            result.title,
            f"{[*result.turns.values()][-1][-1].rss_bytes / _MEGA:,.0f} MB",
            f"{result.load_s:.2f} s",
            f"{report.disk[result.contestant.model_format] / _MEGA:,.1f} MB",
        ]
        for result in report.results
        if result.turns
    ]
    return table(["", "memory", "load", "on disk"], rows)
