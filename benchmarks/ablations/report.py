"""An ablation's results as tables with the paper's figures, and as directions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.ablations.findings import Estimate, Estimates, Finding, Results, find_directions
from benchmarks.ablations.tables import Table, distinct_variants


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One figure of a table.

    Attributes:
        figure: its name in the results.
        is_part: whether it is shown in percent.
    """

    heading: str
    figure: str
    is_part: bool = True


_LOSS: Final = Column(heading="masked loss", figure="masked_loss", is_part=False)
_MASKED: Final = Column(heading="masked acc.", figure="masked_accuracy")
_NSP_HEAD: Final = Column(heading="NSP, own head", figure="nsp_head_accuracy")
_SOP_HEAD: Final = Column(heading="SOP, own head", figure="sop_head_accuracy")
_NSP_PROBE: Final = Column(heading="NSP, probe", figure="nsp_probe_accuracy")
_SOP_PROBE: Final = Column(heading="SOP, probe", figure="sop_probe_accuracy")


def columns(table: Table) -> tuple[Column, ...]:
    """The figures that a table shows."""
    if table.name == "sentence":
        return (_LOSS, _MASKED, _NSP_HEAD, _SOP_HEAD, _NSP_PROBE, _SOP_PROBE)
    return (_LOSS, _MASKED, _SOP_HEAD, _SOP_PROBE)


def render(tables: Sequence[Table], results: Results, heading: Sequence[str]) -> str:
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


def _render_table(table: Table, results: Results) -> list[str]:
    shown = columns(table)
    estimates = Estimates(results)
    headings = ["", "parameters", *(column.heading for column in shown), *table.paper_columns]
    lines = [f"## {table.title}", "", _cells(headings), _cells(["---"] * len(headings))]
    for row in table.rows:
        runs = [results[each] for each in row.variants if each in results]
        cells = [row.label, f"{runs[0].figures['parameters'] / 1e6:.2f}M" if runs else "not run"]
        cells += [_cell(estimates.of(row, column.figure), column) for column in shown]
        paper = row.paper or ("",) * len(table.paper_columns)
        lines.append(_cells([*cells, *paper]))
    without = _without_a_model(table, results)
    return [*lines, "", *([without, ""] if without else [])]


def _without_a_model(table: Table, results: Results) -> str:
    for each in distinct_variants([table]):
        if each in results:
            run = results[each].figures
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
