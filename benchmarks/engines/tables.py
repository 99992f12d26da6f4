"""A report as tables for people."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.engines.contest import Process, Result
from benchmarks.engines.jobs import BASELINE, QUESTIONS, TEXTS, Turn
from benchmarks.engines.report import (
    Report,
    median_rate,
    median_seconds,
    part_of_peak,
    same_answers,
    speed_ratio,
    spread_of,
)
from benchmarks.harness.tables import bullets, table

_GIGA: Final = 1e9
_MEGA: Final = 1e6
_MILLI: Final = 1e-3
_NONE: Final = "–"
# Of others, during turns: more, and figures are not to be trusted.
_QUIET_CPUS: Final = 0.05
# A note names contestants that use a smaller fraction of their threads' CPUs.
_IDLE: Final = 0.75
# Whose speed is compared with everybody's.
_COMPARED: Final = (BASELINE, "ours-fp32", "ours-int8")


def save(report: Report, folder: Path) -> None:
    """Write `results.json` and `tables.md`.

    Raises:
        OSError: one cannot be written.
    """
    (folder / "results.json").write_text(json.dumps(report.to_dict(), indent=1), encoding="utf-8")
    (folder / "tables.md").write_text(markdown(report), encoding="utf-8")


def markdown(report: Report) -> str:
    """Return all tables, the description of the machine, and the notes."""
    sections = [bullets([*report.machine, *_peak(report)])]
    if report.shapes:
        sections.append("\n\n".join(["## Fixed shapes, rows x tokens", *_shape_tables(report)]))
    sections += [_stream(report, case) for case in (TEXTS, QUESTIONS) if case in report.peaks]
    sections += ["## Processes", _processes(report), "## Notes", bullets(_notes(report))]
    return "\n\n".join(sections) + "\n"


def _peak(report: Report) -> Iterator[str]:
    """Describe the peak that percentages count from, and the load of other programs."""
    if report.others is not None:
        yield f"other programs used {report.others:.2f} CPUs during turns"
    peaks = [one for peaks in report.peaks.values() for one in peaks]
    for name, speeds, by in (
        ("fp32", [one.fp32 for one in peaks], {one.fp32_by for one in peaks}),
        ("bf16", [one.bf16 for one in peaks], {one.bf16_by for one in peaks}),
    ):
        speed = statistics.median(speeds) / _GIGA
        if not speed:  # the processor multiplies no bf16
            continue
        measured = f"{speed:,.0f} GFLOP/s, median of {len(peaks)}"
        yield f"plain {name} product ({' or '.join(sorted(by))}): {measured}"


def _shape_tables(report: Report) -> Iterator[str]:
    results = [one for one in report.results if any(case in one.turns for case in report.shapes)]

    def table(title: str, cell: Callable[[Result, str], str]) -> str:
        rows = [
            (one, [cell(one, case) if case in one.turns else _NONE for case in report.shapes])
            for one in results
        ]
        return f"{title}\n\n{_table(report.shapes, rows)}"

    yield table("Milliseconds of a call:", _milliseconds)
    yield table(
        "GFLOP/s, and the part of the plain fp32 product's in the same round:",
        partial(_speed, report),
    )
    for rival in _rivals(report, report.shapes):
        yield table(
            f"How many times as fast as {rival.contestant.name}:",
            partial(_ratio, rival),
        )


def _stream(report: Report, case: str) -> str:
    rivals = list(_rivals(report, [case]))
    noun, agreement = (
        ("texts/s", ["largest difference", "rms / spread", "same label"])
        if case == TEXTS
        else ("questions/s", ["same answer"])
    )
    names = [f"times {rival.contestant.name}" for rival in rivals]
    rows = [
        (
            one,
            [
                f"{median_rate(one.turns[case]):.2f}",
                *(_ratio(rival, one, case) for rival in rivals),
                str(one.batch_sizes[case] or "own"),
                f"{one.turns[case][0].padding:.1%}",
                *_agreement(report, one, case),
            ],
        )
        for one in report.results
        if case in one.turns
    ]
    table = _table([noun, *names, "batch", "padding", *agreement], rows)
    return f"## {_stream_title(report, case)}\n\n{table}"


def _stream_title(report: Report, case: str) -> str:
    if case == QUESTIONS:
        return f"{len(report.inputs.questions)} questions, tokenisation included"
    lengths = report.inputs.text_lengths
    return (
        f"{len(lengths)} texts of {min(lengths)} to {max(lengths)} tokens "
        f"({statistics.fmean(lengths):.0f} on average), tokenisation included"
    )


def _processes(report: Report) -> str:
    """One row a process; a contestant may have several."""
    headings = ["memory", "of it imports", "load", "on disk", "largest difference"]
    lines = [
        [
            f"{process.job.name}, {process.job.task}",
            f"{process.memory.rss_bytes / _MEGA:,.0f} MB",
            f"{process.opened.import_bytes / _MEGA:,.0f} MB",
            f"{process.opened.load_s:.2f} s",
            f"{report.disk_bytes(process) / _MEGA:,.1f} MB",
            _largest_difference(report, result, process),
        ]
        for result in report.results
        for process in result.processes
    ]
    return table(["", *headings], lines)


def _largest_difference(report: Report, result: Result, process: Process) -> str:
    """Return the largest difference of the process' probabilities, over all its cases."""
    if process.job.task != "text-classification":
        return _NONE
    largest = [
        difference.largest
        for case, difference in report.differences(result).items()
        if result.ways.get(case) == process.job.variant.name
    ]
    return f"{max(largest):.1e}" if largest else _NONE


def _agreement(report: Report, result: Result, case: str) -> list[str]:
    reference = report.reference(result, case)
    if reference is None:
        return [_NONE] * (3 if case == TEXTS else 1)
    if case == QUESTIONS:
        return [f"{same_answers(result.turns[case][0].outputs, reference):.0%}"]
    difference = report.differences(result)[case]
    return [
        f"{difference.largest:.1e}",
        f"{difference.relative:.1%}",
        f"{difference.same_label:.0%}",
    ]


def _notes(report: Report) -> Iterator[str]:
    yield from report.notes
    base = report.find(BASELINE)
    if base is not None:
        yield f"differences and same answers: from {base.contestant.name}, in probabilities"
        if TEXTS in base.turns:
            spread = spread_of(base.turns[TEXTS][0].outputs)
            yield f"spread: standard deviation of its probabilities over the texts, {spread:.3f}"
    if QUESTIONS in report.peaks and report.guesses:
        yield "same answers are not counted: those of random weights are chance; give --checkpoint"
    if report.others is not None and report.others > _QUIET_CPUS:
        yield (
            "**the machine was busy with something else**: these figures are no good, least for "
            "those whose threads give way while they wait, such as OpenVINO's; measure again"
        )
    for result in report.results:
        ways = [f"{case} {way}" for case, way in result.ways.items() if way]
        if ways:
            yield f"{result.contestant.name}, its fastest way: {'; '.join(ways)}"
        if result.contestant.part != "all" and result.turns:
            yield f"{result.contestant.name}: on a {result.contestant.part} of the texts, in order"
        idle = [
            case
            for case, turns in result.turns.items()
            if _cpus(turns) < _IDLE * report.num_threads
        ]
        if idle:
            used = min(_cpus(result.turns[case]) for case in idle)
            yield f"{result.contestant.name} used {used:.1f} CPUs or more at {', '.join(idle)}"
        for failure in result.failures:
            yield f"{result.contestant.name}: {failure}"


def _cpus(turns: Sequence[Turn]) -> float:
    """CPUs that a contestant used, the median over rounds."""
    return statistics.median(turn.cpu_seconds / turn.seconds for turn in turns)


def _rivals(report: Report, cases: Sequence[str]) -> Iterator[Result]:
    for key in _COMPARED:
        rival = report.find(key)
        if rival is not None and any(case in rival.turns for case in cases):
            yield rival


def _milliseconds(result: Result, case: str) -> str:
    return f"{median_seconds(result.turns[case]) / _MILLI:,.1f}"


def _speed(report: Report, result: Result, case: str) -> str:
    turns, flops = result.turns[case], report.flops(case)
    part = part_of_peak(turns, report.peaks[case], flops)
    return f"{flops / median_seconds(turns) / _GIGA:,.0f} ({part:.0%})"


def _ratio(rival: Result, result: Result, case: str) -> str:
    if case not in rival.turns:
        return _NONE
    return f"{speed_ratio(result.turns[case], rival.turns[case]):.2f}"


def _table(headings: Sequence[str], rows: Sequence[tuple[Result, list[str]]]) -> str:
    names = [result.contestant.name for result, _ in rows]
    marked = [f"**{name}**" if name.startswith("ours") else name for name in names]
    lines = [[name, *cells] for name, (_, cells) in zip(marked, rows, strict=True)]
    return table(["", *headings], lines)
