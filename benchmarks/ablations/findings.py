"""An ablation's results: standard errors, tables with the paper's figures, and its directions.

Shape legend: N predictions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from benchmarks.ablations.tables import AblationRow, AblationTable, TableName, Variant

# A difference counts if it exceeds this number of standard errors.
_NUM_ERRORS: Final = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantResult:
    """The result of one run.

    Attributes:
        figures: the means, by name.
        predictions: (N,) what each figure is the mean of; the same ones were asked for, in the
            same order, in all runs.
    """

    figures: Mapping[str, Any]
    predictions: Mapping[str, NDArray[np.float32]]


VariantResults: TypeAlias = Mapping[Variant, VariantResult]


class Estimate(NamedTuple):
    """A mean, and its standard error of sampling; how much another seed changes is not in it."""

    mean: float
    error: float


class Estimates:
    """The figures of rows."""

    def __init__(self, results: VariantResults) -> None:
        self._results = results

    def of(self, row: AblationRow, figure: str) -> Estimate | None:
        """Return a row's figure; None where its run does not have that."""
        values = self._predictions(row, figure)
        if values is None:
            return None
        return Estimate(self._results[row.variant].figures[figure], _sampling_error(values))

    def difference(
        self, row: AblationRow, figure: str, other: AblationRow, of_other: str
    ) -> Estimate | None:
        """Return a row's figure minus another's, or minus another figure of the same row.

        Where both were asked the same, they are compared prediction by prediction: what is hard
        for both is no noise.
        """
        ones, twos = self._predictions(row, figure), self._predictions(other, of_other)
        if ones is None or twos is None:
            return None
        if len(ones) == len(twos):
            error = _sampling_error(ones - twos)
        else:
            error = math.hypot(_sampling_error(ones), _sampling_error(twos))
        mean = float(ones.mean(dtype=np.float64) - twos.mean(dtype=np.float64))
        return Estimate(mean, error)

    def above_no_model(self, row: AblationRow, accuracy: str) -> Estimate | None:
        """Return a sentence task's accuracy minus the best one that reads no text.

        That is always to give the more frequent label, or to go by the segments' lengths.
        """
        task, estimate = accuracy.split("_")[0], self.of(row, accuracy)
        by_lengths = self.difference(row, accuracy, row, f"{task}_lengths_accuracy")
        if estimate is None or by_lengths is None:
            return None
        majority = self._results[row.variant].figures[f"{task}_majority"]
        by_label = Estimate(estimate.mean - majority, estimate.error)
        return min(by_lengths, by_label, key=lambda each: each.mean)

    def _predictions(self, row: AblationRow, figure: str) -> NDArray[np.float32] | None:
        result = self._results.get(row.variant)
        return None if result is None else result.predictions.get(figure)


def _sampling_error(values: NDArray[np.float32]) -> float:
    return float(values.std(dtype=np.float64)) / math.sqrt(len(values))


@dataclass(frozen=True, slots=True)
class Direction:
    """Something that the paper found: one row does better than another, or no better.

    Attributes:
        table: the name of their table.
        better: label of the row that is better in the paper.
        worse: label of the other row; None to compare with a guess that needs no model.
        expects: whether the paper found a difference to speak of.
    """

    claim: str
    table: TableName
    figure: str
    better: str
    worse: str | None = None
    expects: bool = True


# Sentence tasks in percent of pairs, sharing in downstream tasks' average.
_DIRECTIONS: Final = (
    Direction(
        "SOP-trained can tell SOP (86.5 % in the paper)",
        "sentence",
        "sop_head_accuracy",
        "sop trained",
    ),
    Direction(
        "NSP-trained can tell NSP (90.5 %)",
        "sentence",
        "nsp_head_accuracy",
        "nsp trained",
    ),
    Direction(
        "SOP-trained can tell NSP (78.9 %)",
        "sentence",
        "nsp_head_accuracy",
        "sop trained",
    ),
    Direction(
        "NSP-trained cannot tell SOP (52.0 %)",
        "sentence",
        "sop_head_accuracy",
        "nsp trained",
        expects=False,
    ),
    Direction(
        "SOP-trained knows more of SOP than NSP-trained, by a probe",
        "sentence",
        "sop_probe_accuracy",
        "sop trained",
        worse="nsp trained",
    ),
    Direction(
        "NSP-trained knows more of NSP than SOP-trained, by a probe",
        "sentence",
        "nsp_probe_accuracy",
        "nsp trained",
        worse="sop trained",
    ),
    Direction(
        "masked tokens suffer from SOP (54.0 against 54.9 %)",
        "sentence",
        "masked_accuracy",
        "none trained",
        worse="sop trained",
    ),
    Direction(
        "sharing all costs (80.1 against 81.6)",
        "sharing",
        "masked_loss",
        "nothing shared",
        worse="all shared",
    ),
    Direction(
        "sharing the FFN costs (80.2 against 81.6)",
        "sharing",
        "masked_loss",
        "nothing shared",
        worse="FFN shared",
    ),
    Direction(
        "sharing attention does not cost (81.7 against 81.6)",
        "sharing",
        "masked_loss",
        "nothing shared",
        worse="attention shared",
        expects=False,
    ),
    Direction(
        "sharing the FFN costs more than sharing attention (80.2 against 81.7)",
        "sharing",
        "masked_loss",
        "attention shared",
        worse="FFN shared",
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A direction as it came out here.

    Attributes:
        ahead: lead of the paper's better row; negative if it is behind.
    """

    direction: Direction
    ahead: Estimate

    @property
    def verdict(self) -> str:
        """The comparison with the paper, in words."""
        limit = _NUM_ERRORS * self.ahead.error
        if not self.direction.expects:
            return "does not reproduce" if self.ahead.mean > limit else "no better here either"
        if self.ahead.mean > limit:
            return "reproduces"
        if self.ahead.mean < -limit and self.direction.worse is not None:
            return "the reverse"
        return "not seen here"


def find_directions(tables: Sequence[AblationTable], results: VariantResults) -> list[Finding]:
    """The paper's directions, as far as there are results."""
    estimates = Estimates(results)
    findings: list[Finding] = []
    for direction in _DIRECTIONS:
        rows = {
            row.label: row
            for table in tables
            if table.name == direction.table
            for row in table.rows
        }
        if not rows:
            continue
        ahead = _ahead(direction, rows, estimates)
        if ahead is not None:
            findings.append(Finding(direction=direction, ahead=ahead))
    return findings


def _ahead(
    direction: Direction, rows: Mapping[str, AblationRow], estimates: Estimates
) -> Estimate | None:
    row, figure = rows[direction.better], direction.figure
    if direction.worse is None:
        return estimates.above_no_model(row, figure)
    if figure == "masked_loss":
        return estimates.difference(rows[direction.worse], figure, row, figure)
    return estimates.difference(row, figure, rows[direction.worse], figure)


class Column(NamedTuple):
    """One figure of a table.

    Attributes:
        figure: its name in the results.
        is_part: whether it is shown in percent.
    """

    heading: str
    figure: str
    is_part: bool = True


_LOSS: Final = Column("masked loss", "masked_loss", is_part=False)
_MASKED: Final = Column("masked acc.", "masked_accuracy")
_NSP_HEAD: Final = Column("NSP, own head", "nsp_head_accuracy")
_SOP_HEAD: Final = Column("SOP, own head", "sop_head_accuracy")
_NSP_PROBE: Final = Column("NSP, probe", "nsp_probe_accuracy")
_SOP_PROBE: Final = Column("SOP, probe", "sop_probe_accuracy")


def _columns(table: AblationTable) -> tuple[Column, ...]:
    """The figures that a table shows."""
    if table.name == "sentence":
        return (_LOSS, _MASKED, _NSP_HEAD, _SOP_HEAD, _NSP_PROBE, _SOP_PROBE)
    return (_LOSS, _MASKED, _SOP_HEAD, _SOP_PROBE)


def render(tables: Sequence[AblationTable], results: VariantResults, heading: Sequence[str]) -> str:
    """All tables and the directions as Markdown.

    Args:
        heading: lines that describe the runs.
    """
    lines = ["# Ablations", "", *heading, ""]
    for table in tables:
        lines += _render_table(table, results)
    findings = find_directions(tables, results)
    if findings:
        lines += _render_findings(findings)
    return "\n".join(lines).rstrip() + "\n"


def _render_table(table: AblationTable, results: VariantResults) -> list[str]:
    shown = _columns(table)
    estimates = Estimates(results)
    headings = ["", "parameters", *(column.heading for column in shown), *table.paper_columns]
    lines = [f"## {table.title}", "", _cells(headings), _cells(["---"] * len(headings))]
    for row in table.rows:
        run = results.get(row.variant)
        cells = [row.label, f"{run.figures['parameters'] / 1e6:.2f}M" if run else "not run"]
        cells += [_cell(estimates.of(row, column.figure), column) for column in shown]
        paper = row.paper or ("",) * len(table.paper_columns)
        lines.append(_cells([*cells, *paper]))
    without = _without_a_model(table, results)
    return [*lines, "", *([without, ""] if without else [])]


def _without_a_model(table: AblationTable, results: VariantResults) -> str:
    for row in table.rows:
        if row.variant in results:
            run = results[row.variant].figures
            return (
                "Without reading the text: always the more frequent label, "
                f"NSP {run['nsp_majority']:.1%}, SOP {run['sop_majority']:.1%}; by the two "
                f"segments' lengths, NSP {run['nsp_lengths_accuracy']:.1%}, "
                f"SOP {run['sop_lengths_accuracy']:.1%}."
            )
    return ""


def _render_findings(findings: Sequence[Finding]) -> list[str]:
    lines = ["## Directions", "", _cells(["the paper", "ahead by", "here"]), _cells(["---"] * 3)]
    for finding in findings:
        is_loss = finding.direction.figure == "masked_loss"
        scale, digits, unit = (1, 3, " nats") if is_loss else (100, 1, " points")
        ahead, error = (
            f"{scale * x:.{digits}f}" for x in (finding.ahead.mean, finding.ahead.error)
        )
        lines.append(_cells([finding.direction.claim, f"{ahead} ± {error}{unit}", finding.verdict]))
    return [*lines, ""]


def _cell(estimate: Estimate | None, column: Column) -> str:
    if estimate is None:
        return "–"
    if column.is_part:
        return f"{100 * estimate.mean:.1f} ± {100 * estimate.error:.1f}"
    return f"{estimate.mean:.3f} ± {estimate.error:.3f}"


def _cells(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
