"""An ablation's results as tables beside the paper's, as directions, and as a picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from training.ablate_tables import Row, Table, TableName, Variant, distinct_variants

if TYPE_CHECKING:  # slow to import
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Figures: TypeAlias = Mapping[str, Any]
Results: TypeAlias = Mapping[Variant, Figures]

# A difference is told from none where it exceeds so many standard errors.
_NUM_ERRORS: Final = 2.0
_COLOUR: Final = "#0072B2"
_DOTS_AN_INCH: Final = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A mean over seeds, and its standard error; `count` runs made it."""

    mean: float
    error: float
    count: int


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


class Estimates:
    """The figures of rows, with the error of sampling and, where it is known, of the seed.

    How much a figure varies between seeds is pooled over all models that were trained with
    several. Without such, it is not in the errors.
    """

    def __init__(self, results: Results) -> None:
        self._results = results

    def __call__(self, row: Row, figure: str) -> Estimate | None:
        """None where no run of the row has the figure."""
        runs = [self._results[each] for each in row.variants if each in self._results]
        runs = [run for run in runs if figure in run]
        if not runs:
            return None
        sampling = max(run[f"{figure}_se"] for run in runs)
        # All runs are asked about the same text, so that more of them do not lessen its error.
        error = math.sqrt(sampling**2 + (self.seed_variance(figure) or 0.0) / len(runs))
        return Estimate(mean=fmean(run[figure] for run in runs), error=error, count=len(runs))

    def seed_variance(self, figure: str) -> float | None:
        """Of a single run; None where no model was trained with several seeds."""
        groups: dict[tuple[object, ...], list[float]] = {}
        for each, run in self._results.items():
            if figure in run and each.num_steps > 1:
                key = (each.sharing, each.embedding_size, each.sentence_task, each.num_steps)
                groups.setdefault(key, []).append(run[figure])
        several = [group for group in groups.values() if len(group) > 1]
        degrees = sum(len(group) - 1 for group in several)
        if not degrees:
            return None
        return sum(variance(group) * (len(group) - 1) for group in several) / degrees


@dataclass(frozen=True, kw_only=True, slots=True)
class Direction:
    """Something that the paper found: one row does better than another.

    Attributes:
        table: the name of their table.
        better: label of the row that is better in the paper; None for `baseline`.
        worse: label of the other; None for `baseline`.
        baseline: a figure of the other row's run, where a row is compared with
            what needs no model.
        expects: whether the paper found a difference, or none to speak of.
    """

    claim: str
    table: TableName
    figure: str
    better: str
    worse: str | None = None
    baseline: str | None = None
    expects: bool = True


_DIRECTIONS: Final = (
    Direction(
        claim="SOP-trained solves SOP (86.5 % in the paper)",
        table="sentence",
        figure="sop_head_accuracy",
        better="sop trained",
        baseline="sop_lengths_accuracy",
    ),
    Direction(
        claim="NSP-trained solves NSP (90.5 %)",
        table="sentence",
        figure="nsp_head_accuracy",
        better="nsp trained",
        baseline="nsp_lengths_accuracy",
    ),
    Direction(
        claim="SOP-trained solves much of NSP (78.9 %)",
        table="sentence",
        figure="nsp_head_accuracy",
        better="sop trained",
        baseline="nsp_lengths_accuracy",
    ),
    Direction(
        claim="NSP-trained does not solve SOP (52.0 %)",
        table="sentence",
        figure="sop_head_accuracy",
        better="nsp trained",
        baseline="sop_lengths_accuracy",
        expects=False,
    ),
    Direction(
        claim="SOP-trained knows more of SOP than NSP-trained, by a probe",
        table="sentence",
        figure="sop_probe_accuracy",
        better="sop trained",
        worse="nsp trained",
    ),
    Direction(
        claim="NSP-trained knows more of NSP than SOP-trained, by a probe",
        table="sentence",
        figure="nsp_probe_accuracy",
        better="nsp trained",
        worse="sop trained",
    ),
    Direction(
        claim="masked tokens suffer from SOP (54.0 against 54.9 %)",
        table="sentence",
        figure="masked_accuracy",
        better="none trained",
        worse="sop trained",
    ),
    Direction(
        claim="sharing all costs (80.1 against 81.6)",
        table="sharing",
        figure="masked_loss",
        better="nothing shared",
        worse="all shared",
    ),
    Direction(
        claim="sharing the FFN costs (80.2 against 81.6)",
        table="sharing",
        figure="masked_loss",
        better="nothing shared",
        worse="FFN shared",
    ),
    Direction(
        claim="sharing attention does not cost (81.7 against 81.6)",
        table="sharing",
        figure="masked_loss",
        better="nothing shared",
        worse="attention shared",
        expects=False,
    ),
    Direction(
        claim="sharing the FFN costs more than sharing attention (80.2 against 81.7)",
        table="sharing",
        figure="masked_loss",
        better="attention shared",
        worse="FFN shared",
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A direction as it came out: how far the better row is ahead, and whether that is the paper's.

    Attributes:
        ahead: positive where the paper's better row is better here.
        error: of `ahead`.
    """

    direction: Direction
    ahead: float
    error: float

    @property
    def verdict(self) -> str:
        """In words."""
        limit = _NUM_ERRORS * self.error
        if not self.direction.expects:
            return "reproduces" if abs(self.ahead) <= limit else "does not reproduce"
        if abs(self.ahead) <= limit:
            return "not told from none"
        return "reproduces" if self.ahead > 0 else "the reverse"


def find_directions(tables: Sequence[Table], results: Results) -> list[Finding]:
    """The paper's directions as far as there are results."""
    estimates = Estimates(results)
    findings = []
    for direction in _DIRECTIONS:
        rows = {
            row.label: row for each in tables if each.name == direction.table for row in each.rows
        }
        if not rows:
            continue
        better = estimates(rows[direction.better], direction.figure)
        if direction.worse is not None:
            worse = estimates(rows[direction.worse], direction.figure)
        else:
            worse = _baseline(rows[direction.better], direction.baseline, results)
        if better is None or worse is None:
            continue
        sign = -1.0 if direction.figure == "masked_loss" else 1.0
        findings.append(
            Finding(
                direction=direction,
                ahead=sign * (better.mean - worse.mean),
                error=math.hypot(better.error, worse.error),
            )
        )
    return findings


def _baseline(row: Row, figure: str | None, results: Results) -> Estimate | None:
    runs = [results[each] for each in row.variants if each in results]
    if not runs or figure is None:
        return None
    return Estimate(mean=runs[0][figure], error=runs[0][f"{figure}_se"], count=1)


def render(tables: Sequence[Table], results: Results, heading: Sequence[str]) -> str:
    """All tables and the directions as Markdown.

    Args:
        heading: lines that say what was run.
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
        cells = [row.label, f"{runs[0]['parameters'] / 1e6:.2f}M" if runs else "not run"]
        cells += [_cell(estimates(row, column.figure), column) for column in shown]
        paper = row.paper or ("",) * len(table.paper_columns)
        lines.append(_cells([*cells, *paper]))
    without = _without_a_model(table, results)
    return [*lines, "", *([without, ""] if without else [])]


def _without_a_model(table: Table, results: Results) -> str:
    for each in distinct_variants([table]):
        if each in results:
            run = results[each]
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
        ahead, error = (f"{scale * x:.{digits}f}" for x in (finding.ahead, finding.error))
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


def draw(tables: Sequence[Table], results: Results) -> Figure:
    """Plots of each table's figures, a row for each table; error bars are standard errors."""
    from matplotlib.figure import Figure

    tables = [
        table for table in tables if any(v in results for r in table.rows for v in r.variants)
    ]
    num_columns = max(len(columns(table)) for table in tables)
    heights = [0.34 * len(table.rows) + 0.9 for table in tables]
    figure = Figure(figsize=(2.1 * num_columns + 1.4, sum(heights) + 0.3), layout="constrained")
    parts = figure.subfigures(len(tables), 1, height_ratios=heights, squeeze=False)[:, 0]
    estimates = Estimates(results)
    for table, part in zip(tables, parts, strict=True):
        part.suptitle(table.title, fontsize="medium")
        axes = part.subplots(1, num_columns, squeeze=False)[0]
        for ax, column in zip(axes, columns(table), strict=False):
            _draw_column(ax, table, column, estimates)
            ax.tick_params(labelleft=ax is axes[0])
        for ax in axes[len(columns(table)) :]:
            ax.set_axis_off()
    return figure


def _draw_column(
    ax: Axes, table: Table, column: Column, estimates: Callable[[Row, str], Estimate | None]
) -> None:
    places = range(len(table.rows))
    scale = 100 if column.is_part else 1
    for place, row in zip(places, table.rows, strict=True):
        found = estimates(row, column.figure)
        if found is not None:
            ax.errorbar(
                scale * found.mean,
                place,
                xerr=scale * found.error,
                fmt="o",
                color=_COLOUR,
                markersize=5,
                capsize=3,
                linewidth=1.2,
            )
    ax.set_title(column.heading + (" (%)" if column.is_part else " (nats)"), fontsize="small")
    ax.set_yticks(places, [row.label for row in table.rows])
    ax.set_ylim(len(table.rows) - 0.5, -0.5)
    ax.grid(visible=True, axis="x", color="#dddddd", linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)
    ax.margins(x=0.2)
    ax.tick_params(labelsize="small")
