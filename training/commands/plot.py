"""Plot the metrics of training runs, finished or not.

Draws the `metrics.jsonl` of one or several runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from training.errors import TrainingError, report_errors
from training.options.flags import Options, add_flags, flag, read_flags
from training.system.command_line import make_parser

if TYPE_CHECKING:  # slow to import
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_EXAMPLES: Final = r"""examples:
  albert-serve plot runs/base
  albert-serve plot runs/lamb runs/muon --x hours --output optimizers.png
"""
_XAxis = Literal["steps", "tokens", "hours"]
# The figure of each x axis, and the number of it in one unit.
_X_AXES: Final[dict[_XAxis, tuple[str, float]]] = {
    "steps": ("step", 1),
    "tokens": ("tokens", 1),
    "hours": ("elapsed_s", 3600),
}
_HELD_OUT: Final = "validation/"
_NO_PANEL: Final = frozenset({"step", "tokens", "elapsed_s", "plateau", "skipped"})
_PANEL_INCHES: Final = (4.0, 3.2)
_NUM_COLUMNS: Final = 3
# Half the window of the moving mean, as a fraction of the points.
_SMOOTHING: Final = 0.04


class RecordError(TrainingError):
    """A run whose metrics cannot be read or drawn."""


def draw_curves(runs: Sequence[Path], *, x: _XAxis = "steps") -> Figure:
    """Draw a panel for each figure of the runs, which are drawn over each other.

    Raises:
        RecordError: a folder is not a run's, or no run has recorded a figure.
    """
    lines_of = {str(run): _read_lines(run / "metrics.jsonl") for run in runs}
    recorded = [name for lines in lines_of.values() for line in lines for name in line]
    names = [*dict.fromkeys(name.removeprefix(_HELD_OUT) for name in recorded)]
    names = [name for name in names if name not in _NO_PANEL]
    if not names:
        raise RecordError(f"{', '.join(lines_of)}: no figure that can be drawn")
    figure, axes = _grid(len(names))
    for name, ax in zip(names, axes, strict=True):
        for number, (label, lines) in enumerate(lines_of.items()):
            _draw_run(ax, name, label, lines, x, f"C{number}")
        _scale(ax, name)
    for number, run in enumerate(runs):
        entropy = _read_entropy(run)
        if entropy is not None and "fill-mask/loss" in names:
            ax = axes[names.index("fill-mask/loss")]
            ax.axhline(entropy, color=f"C{number}", linestyle=":", label="entropy of tokens")
    for ax in axes[-_NUM_COLUMNS:]:
        ax.set_xlabel("hours of training" if x == "hours" else x)
    legends = [ax.get_legend_handles_labels() for ax in axes]
    by_label = {label: each for part in legends for each, label in zip(*part, strict=True)}
    handles, labels = [*by_label.values()], [*by_label]
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False)
    return figure


def smooth(values: NDArray[np.float64], part: float = _SMOOTHING) -> NDArray[np.float64]:
    """Return the moving mean (P,), over that fraction of all values on either side."""
    reach = int(len(values) * part)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(len(values))
    reaches = np.minimum(reach, np.minimum(places, places[::-1]))
    means: NDArray[np.float64] = (sums[places + reaches + 1] - sums[places - reaches]) / (
        2 * reaches + 1
    )
    return means


def _read_lines(file: Path) -> list[dict[str, Any]]:
    """Read the lines of a run, but for a truncated last one, which the run may be writing."""
    if not file.is_file():
        raise RecordError(f"{file.parent} has no {file.name}; give the --output folder of a run")
    try:
        lines = [json.loads(line) for line in file.read_bytes().split(b"\n")[:-1]]
    except ValueError as error:
        raise RecordError(f"{file} is damaged: {error}") from error
    if not lines:
        raise RecordError(f"{file} is empty: the run has recorded nothing yet")
    return lines


def _read_entropy(run: Path) -> float | None:
    """Return the unigram entropy of a run's corpus, in nats; None where it is not recorded."""
    file = run / "run.json"
    if not file.is_file():
        return None
    try:
        entropy: float | None = json.loads(file.read_bytes()).get("unigram_entropy")
    except (ValueError, AttributeError) as error:
        raise RecordError(f"{file} is not what a run writes: {error}") from error
    return entropy


def _grid(num_panels: int) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    num_columns = min(num_panels, _NUM_COLUMNS)
    num_rows = -(-num_panels // num_columns)
    width, height = _PANEL_INCHES
    size = (_NUM_COLUMNS * width, num_rows * height + 0.8)
    figure = Figure(figsize=size, layout="constrained")
    axes = [figure.add_subplot(num_rows, num_columns, place + 1) for place in range(num_panels)]
    for ax in axes:
        ax.grid(visible=True, color="#dddddd", linewidth=0.6)
    return figure, axes


def _draw_run(
    ax: Axes, name: str, run: str, lines: Sequence[dict[str, Any]], x: _XAxis, colour: str
) -> None:
    x_figure, unit = _X_AXES[x]

    def points(figure: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        known = [line for line in lines if line.get(figure) is not None]
        values = np.array([line[figure] for line in known], np.float64)
        return np.array([line[x_figure] for line in known], np.float64) / unit, values

    positions, values = points(name)
    if len(values):
        smoothed = values if name == "lr_factor" else smooth(values)
        marker = "o" if len(values) == 1 else None  # a line of one point is not visible
        ax.plot(positions, values, color=colour, linewidth=0.8, alpha=0.3)
        ax.plot(positions, smoothed, color=colour, linewidth=1.6, marker=marker, label=run)
    held_out = points(_HELD_OUT + name)
    if len(held_out[0]):
        ax.plot(*held_out, color=colour, linestyle="--", marker="o", label=f"{run}, held-out")


def _scale(ax: Axes, name: str) -> None:
    from matplotlib.ticker import EngFormatter, PercentFormatter

    ax.set_title(name)
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    if name.endswith("accuracy") or name == "lr_factor":
        ax.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    elif name == "grad_norm":
        ax.set_yscale("log")
    elif name == "tokens_per_s":
        ax.set_ylim(bottom=0)
        ax.yaxis.set_major_formatter(EngFormatter(sep=""))


@dataclass(frozen=True, kw_only=True)
class _PlotConfig(Options, title="picture"):
    """Runs by their folders, and the picture to draw of them."""

    runs: Sequence[Path]
    output: Path | None = flag("picture to write (curves.png)")
    x: _XAxis = flag("quantity on the x axis", "steps")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    parser = make_parser("albert-serve plot", __doc__, _EXAMPLES)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    add_flags(parser, _PlotConfig)
    values = parser.parse_args(arguments)
    return report_errors(lambda: _run(read_flags(_PlotConfig, values, runs=values.runs)))


def _run(config: _PlotConfig) -> int:
    figure = draw_curves(config.runs, x=config.x)
    file = config.output or Path("curves.png")
    try:
        figure.savefig(file, dpi=100)
    except ValueError as error:
        raise RecordError(f"{file}: {error}") from error
    print(file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
