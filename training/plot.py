"""Plot the metrics of training runs, finished or not.

Draws the `metrics.jsonl` of one or several runs, or with --layers their `layers.jsonl`: distance
and angle of each layer's input and output, as in Figure 1 of Lan et al. 2019.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from albert_serve.bundle.weights import CLASSIFICATION, HEAD_NAME
from albert_serve.files import write_atomically
from training.errors import report_errors
from training.loop.recorded import (
    RecordedLayers,
    RecordedRun,
    RecordError,
    XAxis,
    read_layers,
    read_run,
    with_paths_for_names,
)
from training.run.flags import Options, add_flags, flag, read_flags
from training.system.command_line import make_parser

if TYPE_CHECKING:  # slow to import
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

_EXAMPLES: Final = r"""examples:
  python -m training.plot runs/base
  python -m training.plot runs/lamb runs/muon --x hours --output optimizers.png
  python -m training.plot runs/base --layers --output layers.png
"""
# Okabe and Ito's palette for any colour vision, without yellow and black.
_COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
_GREY: Final = "#555555"
_HELD_OUT: Final = "validation/"
_PANEL_INCHES: Final = (4.0, 3.2)
_DOTS_AN_INCH: Final = 100
_NUM_COLUMNS: Final = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class _Panel:
    """One plot of the picture: a figure of the runs.

    Attributes:
        smoothing: half the window of the moving mean, as a fraction of the points.
    """

    title: str
    figure: str
    smoothing: float = 0.04
    scale: Literal["number", "part", "count", "log"] = "number"


# A panel is drawn where a run has its figure.
_PANELS: Final = (
    _Panel(title="masked loss (nats)", figure="fill-mask/loss"),
    _Panel(title="masked accuracy", figure="fill-mask/accuracy", scale="part"),
    _Panel(title="sentence accuracy", figure="sentence-order/accuracy", scale="part"),
    _Panel(title="accuracy of both orders", figure="paired-order/accuracy", scale="part"),
    _Panel(title="classification accuracy", figure="text-classification/accuracy", scale="part"),
    _Panel(title="answer accuracy", figure="question-answering/accuracy", scale="part"),
    _Panel(title="choice accuracy", figure="multiple-choice/accuracy", scale="part"),
    _Panel(title="gradient norm", figure="grad_norm", scale="log"),
    _Panel(title="learning rate, of its peak", figure="lr_factor", smoothing=0, scale="part"),
    _Panel(title="tokens/s", figure="tokens_per_s", scale="count"),
)
# The figure of a further classifier of texts, in training or of held-out text.
_FURTHER_ACCURACY: Final = re.compile(
    rf"(?:{_HELD_OUT})?{CLASSIFICATION}/({HEAD_NAME})/accuracy"
).fullmatch


def draw_curves(runs: Sequence[RecordedRun], *, x: XAxis = "steps") -> Figure:
    """A panel for each figure of the runs, which are drawn over each other.

    Raises:
        RecordError: no run has a figure that a panel shows, or one does not record `x`.
    """
    names = {figure for run in runs for line in run.lines for figure in line}
    panels = [panel for panel in _PANELS if {panel.figure, _HELD_OUT + panel.figure} & names]
    further = sorted({match[1] for name in names if (match := _FURTHER_ACCURACY(name))})
    panels += [
        _Panel(
            title=f"accuracy of {head}", figure=f"{CLASSIFICATION}/{head}/accuracy", scale="part"
        )
        for head in further
    ]
    if not panels:
        raise RecordError(f"{', '.join(run.name for run in runs)}: no figure that can be drawn")
    figure, axes = _grid(len(panels))
    for panel, ax in zip(panels, axes, strict=True):
        for run, colour in zip(runs, _colours(len(runs)), strict=True):
            _draw_run(ax, panel, run, x, colour)
        _finish(ax, panel, _title(panel, runs))
    if panels[0].figure == "fill-mask/loss":
        _draw_entropies(axes[0], runs)
    for ax in axes[-_NUM_COLUMNS:]:
        ax.set_xlabel("hours of training" if x == "hours" else x)
    _add_legend(figure, runs, has_held_out=any(name.startswith(_HELD_OUT) for name in names))
    return figure


def draw_layers(runs: Sequence[RecordedLayers]) -> Figure:
    """Distance and angle of each layer's input and output, as the paper's Figure 1.

    One run has a line for each time that it recorded them, coloured by the step; of several runs
    each has its last.
    """
    from matplotlib.ticker import MaxNLocator

    figure, axes = _grid(2)
    axes[0].set_title("L2 distance of input and output")
    axes[1].set_title("angle of input and output (degrees)")
    if len(runs) == 1:
        _draw_over_steps(figure, axes, runs[0])
    else:
        for run, colour in zip(runs, _colours(len(runs)), strict=True):
            label = f"{run.name} (step {run.steps[-1]:,.0f})"
            _draw_layers(axes, run, -1, colour, label)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)
    for ax in axes:
        ax.set_xlabel("layer")
        ax.set_ylim(bottom=0)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def smooth(values: NDArray[np.float64], part: float) -> NDArray[np.float64]:
    """Return the moving mean (P,), over that fraction of all values on either side."""
    reach = int(len(values) * part)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(len(values))
    reaches = np.minimum(reach, np.minimum(places, places[::-1]))
    means: NDArray[np.float64] = (sums[places + reaches + 1] - sums[places - reaches]) / (
        2 * reaches + 1
    )
    return means


def _save_figure(figure: Figure, file: Path) -> None:
    """Write a picture atomically, in the format of the file's suffix.

    Raises:
        RecordError: there is no such format.
        OSError: the file cannot be written; it names the file.
    """
    formats = figure.canvas.get_supported_filetypes()
    if file.suffix.lower()[1:] not in formats:
        raise RecordError(f"{file} must end in .png, or in one of .{', .'.join(sorted(formats))}")
    content = io.BytesIO()
    figure.savefig(content, format=file.suffix.lower()[1:], dpi=_DOTS_AN_INCH)
    try:
        write_atomically(file, content.getvalue())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from error


def _grid(num_panels: int) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    num_columns = min(num_panels, _NUM_COLUMNS)
    num_rows = -(-num_panels // num_columns)
    width, height = _PANEL_INCHES
    size = (_NUM_COLUMNS * width, num_rows * height * _NUM_COLUMNS / max(num_columns, 2) + 0.4)
    room = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1, wspace=0.02, hspace=0.02)
    figure = Figure(figsize=size, layout=room)
    axes = [figure.add_subplot(num_rows, num_columns, place + 1) for place in range(num_panels)]
    for ax in axes:
        ax.grid(visible=True, color="#dddddd", linewidth=0.6)
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _colours(num_runs: int) -> list[str]:
    """Return a colour for each run; beyond the palette, an even scale from dark to bright."""
    if num_runs <= len(_COLOURS):
        return list(_COLOURS[:num_runs])
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [to_hex(colour) for colour in colormaps["viridis"](np.linspace(0, 0.9, num_runs))]


def _draw_run(ax: Axes, panel: _Panel, run: RecordedRun, x: XAxis, colour: str) -> None:
    positions, values = run.curve(panel.figure, x)
    ax.plot(positions, values, color=colour, linewidth=0.8, alpha=0.3)
    ax.plot(positions, smooth(values, panel.smoothing), color=colour, linewidth=1.6, label=run.name)
    held_out = _held_out_line(*run.curve(_HELD_OUT + panel.figure, x), colour)
    held_out.set_label(f"{run.name}, held-out")
    ax.add_line(held_out)
    ax.autoscale_view()


def _held_out_line(positions: ArrayLike, values: ArrayLike, colour: str) -> Line2D:
    from matplotlib.lines import Line2D

    return Line2D(
        positions,
        values,
        color=colour,
        linewidth=1.0,
        linestyle=(0, (4, 2)),
        marker="o",
        markersize=4.5,
        markerfacecolor="white",
    )


def _draw_entropies(ax: Axes, runs: Sequence[RecordedRun]) -> None:
    known = {run.unigram_entropy for run in runs if run.unigram_entropy is not None}
    for run, colour in zip(runs, _colours(len(runs)), strict=True):
        if run.unigram_entropy is not None:
            colour_of_line = _GREY if len(known) == 1 else colour
            ax.axhline(run.unigram_entropy, color=colour_of_line, linewidth=1.2, linestyle="--")


def _title(panel: _Panel, runs: Sequence[RecordedRun]) -> str:
    """The panel's, with the utilisation that the speed of a single run means."""
    _, parts = runs[0].curve("mfu", "steps")
    if panel.figure != "tokens_per_s" or len(runs) > 1 or not len(parts):
        return panel.title
    return f"{panel.title} (median MFU {np.median(parts):.0%})"


def _finish(ax: Axes, panel: _Panel, title: str) -> None:
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    ax.set_title(title)
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    if panel.scale == "part":
        ax.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g}%")
    elif panel.scale == "count":
        ax.set_ylim(bottom=0)
        ax.yaxis.set_major_formatter(EngFormatter(sep=""))
    elif panel.scale == "log":
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter(NullFormatter())


def _add_legend(figure: Figure, runs: Sequence[RecordedRun], *, has_held_out: bool) -> None:
    from matplotlib.lines import Line2D

    handles: list[Line2D] = [
        Line2D([], [], color=colour, linewidth=1.6, label=run.name)
        for run, colour in zip(runs, _colours(len(runs)), strict=True)
    ]
    if has_held_out:
        handles.append(_held_out_line([], [], _GREY))
        handles[-1].set_label("held-out")
    if any(run.unigram_entropy is not None for run in runs):
        label = "entropy of token frequencies"
        handles.append(Line2D([], [], color=_GREY, linewidth=1.2, linestyle="--", label=label))
    figure.legend(handles=handles, loc="outside upper center", ncols=4, frameon=False)


def _draw_layers(
    axes: Sequence[Axes], run: RecordedLayers, record: int, colour: object, label: str
) -> None:
    layers = np.arange(1, run.distance.shape[1] + 1)
    for ax, values in zip(axes, (run.distance, run.angle_degrees), strict=True):
        ax.plot(layers, values[record], color=colour, linewidth=1.2, marker=".", label=label)


def _draw_over_steps(figure: Figure, axes: Sequence[Axes], run: RecordedLayers) -> None:
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize

    # Without the brightest part, which is hard to see on white.
    colours = ListedColormap(colormaps["viridis_r"](np.linspace(0.1, 1, 256)))
    scale = ScalarMappable(Normalize(run.steps[0], run.steps[-1]), colours)
    for record, step in enumerate(run.steps):
        _draw_layers(axes, run, record, scale.to_rgba(step), f"step {step:,.0f}")
    figure.colorbar(scale, ax=list(axes), label="step", format="{x:,.0f}")
    figure.suptitle(run.name)


@dataclass(frozen=True, kw_only=True)
class _PlotConfig(Options, title="picture"):
    """Runs by their folders, and the picture to draw of them."""

    runs: Sequence[Path]
    output: Path | None = flag("picture to write (curves.png, or layers.png with --layers)")
    x: XAxis = flag("what is to the right", "steps")
    layers: bool = flag("plot distance and angle of each layer's input and output", False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    parser = make_parser("training.plot", __doc__, _EXAMPLES)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    add_flags(parser, _PlotConfig)
    values = parser.parse_args(arguments)
    return report_errors(lambda: _run(read_flags(_PlotConfig, values, runs=values.runs)))


def _run(config: _PlotConfig) -> int:
    if config.layers:
        layers = with_paths_for_names([read_layers(run) for run in config.runs], config.runs)
        figure, file = draw_layers(layers), config.output or Path("layers.png")
    else:
        runs = with_paths_for_names([read_run(run) for run in config.runs], config.runs)
        figure, file = draw_curves(runs, x=config.x), config.output or Path("curves.png")
    _save_figure(figure, file)
    print(file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
