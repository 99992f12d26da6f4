"""Charts of an evaluation: confusion, reliability, figures by depth, scores against predictions.

Shape legend: K labels.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from albert_serve.files import write_atomically
from training.evaluation.calibration import Bin

if TYPE_CHECKING:  # slow to import
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BLUE: Final = "#0072B2"
_GREY: Final = "#555555"
_INCHES: Final = 4.5
_INCHES_A_LABEL: Final = 0.3
_DOTS_AN_INCH: Final = 100
# A larger matrix has no numbers in its cells.
_MOST_NUMBERED: Final = 15


def draw_confusion(names: Sequence[str], counts_KK: NDArray[np.int64], file: Path) -> None:
    """Draw how often each label (rows) was predicted as each (columns); colours are parts of rows.

    Raises:
        OSError: the file cannot be written, as of the other charts.
    """
    inches = max(_INCHES, 1.5 + _INCHES_A_LABEL * len(names))
    figure, ax = _new(inches)
    parts_KK = counts_KK / np.maximum(counts_KK.sum(1, keepdims=True), 1)
    ax.imshow(parts_KK, cmap="Blues", vmin=0, vmax=1)
    # A name may hold a dollar sign, which is no formula.
    ax.set_xticks(range(len(names)), labels=list(names), rotation=90, parse_math=False)
    ax.set_yticks(range(len(names)), labels=list(names), parse_math=False)
    ax.set_xlabel("predicted")
    ax.set_ylabel("label")
    if len(names) <= _MOST_NUMBERED:
        for row, column in np.ndindex(*counts_KK.shape):
            colour = "white" if parts_KK[row, column] > 0.5 else "black"
            count = f"{counts_KK[row, column]:,}"
            ax.text(column, row, count, ha="center", va="center", color=colour, fontsize=8)
    _save(figure, file)


def draw_reliability(bins: Sequence[Bin], file: Path) -> None:
    """Draw the accuracy of predictions over their confidence, with the share of each bin."""
    figure, ax = _new(_INCHES)
    confidences, accuracies, counts = (np.array(each) for each in zip(*bins, strict=True))
    ax.plot([0, 1], [0, 1], color=_GREY, linewidth=1, linestyle="--", label="calibrated")
    ax.bar(
        confidences, counts / counts.sum(), width=0.03, color=_GREY, alpha=0.3, label="share of all"
    )
    ax.plot(confidences, accuracies, color=_BLUE, marker="o", markersize=4, label="accuracy")
    ax.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1))
    ax.legend(loc="upper left", frameon=False)
    _save(figure, file)


def draw_depths(
    by_layer: Sequence[Mapping[str, float]],
    by_patience: Sequence[Mapping[str, float]],
    metric: str,
    file: Path,
) -> None:
    """Draw a metric over the layers that texts had: as many for all, and by patience."""
    figure, ax = _new(_INCHES)
    curves = ((by_layer, "layers", "after each layer"), (by_patience, "mean_layers", "by patience"))
    for (rows, key, label), colour in zip(curves, (_GREY, _BLUE), strict=True):
        layers, values = [row[key] for row in rows], [row[metric] for row in rows]
        ax.plot(layers, values, color=colour, marker="o", markersize=4, label=label)
    for row in by_patience:
        place = (row["mean_layers"], row[metric])
        ax.annotate(str(row["patience"]), place, (0, 5), textcoords="offset points", fontsize=8)
    ax.set(xlabel="mean number of layers", ylabel=metric.replace("_", " "))
    ax.legend(loc="lower right", frameon=False)
    _save(figure, file)


def draw_scores(targets_N: NDArray[Any], predictions_N: NDArray[Any], file: Path) -> None:
    """Draw the predictions of a regression over the scores."""
    figure, ax = _new(_INCHES)
    ends = [min(targets_N.min(), predictions_N.min()), max(targets_N.max(), predictions_N.max())]
    ax.plot(ends, ends, color=_GREY, linewidth=1, linestyle="--")
    ax.scatter(targets_N, predictions_N, s=8, color=_BLUE, alpha=0.4, linewidths=0)
    ax.set(xlabel="score", ylabel="prediction")
    _save(figure, file)


def _new(inches: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(inches, inches), layout="constrained")
    return figure, figure.add_subplot()


def _save(figure: Figure, file: Path) -> None:
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=_DOTS_AN_INCH)
    write_atomically(file, content.getvalue())
