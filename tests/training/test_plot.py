"""The pictures show what the runs recorded; asserted by what is drawn, not by pixels."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from tests.training.support import read_metrics
from training.loop.metrics import Metrics
from training.loop.recorded import RecordError, read_layers, read_run
from training.model.similarity import LayerSimilarity
from training.plot import draw_curves, draw_layers, main, smooth

STEPS = range(10, 401, 10)


def record(folder: Path, *, slope: float = 1.0, entropy: float | None = 6.8) -> Path:
    """A run's folder as training writes it, with curves made up."""
    rng = np.random.default_rng(0)
    with Metrics(folder, step=0) as metrics:
        for step in STEPS:
            fall, noise = slope * step / 400, 0.05 * rng.standard_normal()
            figures = {
                "fill-mask/loss": 7 - fall + noise,
                "fill-mask/accuracy": 0.1 + 0.1 * fall,
                "sentence-order/accuracy": 0.5,
                "grad_norm": 2.0 - fall / 2,
                "lr_factor": 1.0,
                "tokens_per_s": 5000.0,
            }
            metrics.write(step=step, tokens=4000 * step, elapsed_s=1.8 * step, **figures)
            if step % 100 == 0:
                metrics.write(step=step, **{"validation/fill-mask/loss": 7.1 - fall})
                metrics.write_layers(step=step, layers=layers(step))
    note = {} if entropy is None else {"unigram_entropy": entropy}
    (folder / "run.json").write_text(json.dumps({"settings": {}, **note}))
    return folder


def layers(step: int) -> LayerSimilarity:
    return LayerSimilarity(
        distance=(step / 10, step / 20, step / 40), angle_degrees=(40.0, 30.0, 20.0)
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return record(tmp_path / "base")


def panels(figure: Figure) -> dict[str, Axes]:
    return {ax.get_title(): ax for ax in figure.axes}


def points(line: Line2D) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in np.asarray(line.get_xydata())]


def by_label(ax: Axes) -> dict[str, Line2D]:
    lines = {str(line.get_label()): line for line in ax.get_lines()}
    return {label: line for label, line in lines.items() if not label.startswith("_")}


def legend(figure: Figure) -> dict[str, str]:
    """The colours of the legend by label."""
    [legend] = figure.legends
    lines = [handle for handle in legend.legend_handles if isinstance(handle, Line2D)]
    return {str(line.get_label()): to_hex(line.get_color()) for line in lines}


def test_one_run_has_a_panel_for_each_figure(run: Path) -> None:
    figure = draw_curves([read_run(run)])
    assert list(panels(figure)) == [
        *("masked loss (nats)", "masked accuracy", "sentence accuracy"),
        *("gradient norm", "learning rate, of its peak", "tokens/s"),
    ]
    assert list(legend(figure)) == ["base", "held-out", "entropy of token frequencies"]


@pytest.mark.parametrize(
    ("x", "label", "first", "last"),
    [
        ("steps", "steps", 10, 400),
        ("tokens", "tokens", 40_000, 1_600_000),
        ("hours", "hours of training", 0.005, 0.2),
    ],
)
def test_the_x_axis_shows_steps_tokens_or_hours(
    run: Path, x: Any, label: str, first: float, last: float
) -> None:
    figure = draw_curves([read_run(run)], x=x)
    drawn = points(by_label(figure.axes[0])["base"])
    assert [drawn[0][0], drawn[-1][0]] == pytest.approx([first, last])
    assert [ax.get_xlabel() for ax in figure.axes] == [*[""] * 3, *[label] * 3]
    # Lines of held-out figures leave out tokens and time; their step tells.
    held_out = points(by_label(figure.axes[0])["base, held-out"])
    assert held_out[-1][0] == pytest.approx(last)


def test_the_speed_of_one_run_tells_its_utilisation(run: Path) -> None:
    with Metrics(run, step=0) as metrics:
        for step, part in ((1, 0.1), (2, 0.4), (3, 0.41)):
            metrics.write(step=step, tokens_per_s=1000.0, mfu=part)
    figure = draw_curves([read_run(run)])
    assert list(panels(figure)) == ["tokens/s (median MFU 40%)"]
    assert list(panels(draw_curves([read_run(run)] * 2))) == ["tokens/s"]


def test_a_real_run_can_be_drawn(pretrained: Path, tmp_path: Path) -> None:
    ax = panels(draw_curves([read_run(pretrained)]))["masked loss (nats)"]
    lines = [line for line in read_metrics(pretrained) if "fill-mask/loss" in line]
    assert points(ax.get_lines()[0]) == [(line["step"], line["fill-mask/loss"]) for line in lines]
    assert main([str(pretrained), "--output", str(tmp_path / "curves.png")]) == 0


def test_one_runs_layers_have_a_line_for_each_record(run: Path) -> None:
    figure = draw_layers([read_layers(run)])
    distance, angle, bar = figure.axes
    assert [ax.get_title() for ax in (distance, angle)] == [
        "L2 distance of input and output",
        "angle of input and output (degrees)",
    ]
    assert list(by_label(distance)) == [f"step {step}" for step in (100, 200, 300, 400)]
    assert points(by_label(distance)["step 200"]) == [(1, 20), (2, 10), (3, 5)]
    assert points(by_label(angle)["step 200"]) == [(1, 40), (2, 30), (3, 20)]
    assert len({to_hex(line.get_color()) for line in distance.get_lines()}) == 4
    assert bar.get_ylim() == (100, 400)


def layers_line(num_layers: int) -> str:
    values = [1.0] * num_layers
    return json.dumps({"step": 1, "distance": values, "angle_degrees": values})


def append(name: str, content: bytes) -> Callable[[Path], Any]:
    def damage(folder: Path) -> None:
        with (folder / name).open("ab") as stream:
            stream.write(content)

    return damage


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no run": (lambda run: (run / "metrics.jsonl").unlink(), r"base has no metrics\.jsonl; give"),
    "empty": (lambda run: (run / "metrics.jsonl").write_text(""), r"metrics\.jsonl is empty"),
    "cut": (lambda run: (run / "metrics.jsonl").write_text('{"st'), r"metrics\.jsonl is empty"),
    "no JSON": (append("metrics.jsonl", b"{step\n"), r"metrics\.jsonl line 45 is not JSON.*delete"),
    "no text": (append("metrics.jsonl", b"\xff\xfe\n"), "line 45 is not JSON"),
    "blank": (append("metrics.jsonl", b"\n"), "line 45 is not JSON"),
    "no object": (append("metrics.jsonl", b"3\n"), "line 45 has no step; delete"),
    "no step": (append("metrics.jsonl", b'{"loss": 1}\n'), "line 45 has no step"),
    "no number": (append("metrics.jsonl", b'{"step": 1, "loss": "x"}\n'), "45 must hold numbers"),
    "other figures": (
        lambda run: (run / "metrics.jsonl").write_text('{"step": 1, "mood": 2}\n'),
        "base: no figure that can be drawn",
    ),
    "no note": (append("run.json", b"}"), r"run\.json is not what a run writes"),
    "other note": (lambda run: (run / "run.json").write_text("[]"), "is not what a run writes"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_damaged_runs_are_refused(
    run: Path, damage: Callable[[Path], Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(run)
    with pytest.raises(RecordError, match=message):
        draw_curves([read_run(run)])
    assert main([str(run), "--output", str(run / "curves.png")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert not (run / "curves.png").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"base has no layers\.jsonl"),
        ("", "is empty"),
        ('{"step": 1}\n', "line 1 must hold a step, distance and angle_degrees"),
        ('{"step": 1, "distance": [], "angle_degrees": []}\n', "line 1 must hold"),
        ('{"step": 1, "distance": [1], "angle_degrees": [1, 2]}\n', "line 1 must hold"),
        ('{"step": 1, "distance": ["1"], "angle_degrees": [1]}\n', "line 1 must hold"),
        ('{"step": 1, "distance": 1, "angle_degrees": 2}\n', "line 1 must hold"),
        (
            "\n".join([layers_line(1), layers_line(2), ""]),
            "different numbers of layers",
        ),
    ],
)
def test_damaged_layers_are_refused(run: Path, content: str | None, message: str) -> None:
    (run / "layers.jsonl").unlink()
    if content is not None:
        (run / "layers.jsonl").write_text(content)
    with pytest.raises(RecordError, match=message):
        read_layers(run)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("curves", r"curves must end in \.png"),
        ("curves.doc", r"curves\.doc must end in \.png"),
        ("missing/curves.png", "No such file or directory: '.*curves.png"),
        ("folder.png", "Is a directory: '.*folder.png'"),
    ],
)
def test_a_picture_that_cannot_be_written(
    run: Path, output: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "folder.png").mkdir()
    assert main([str(run), "--output", str(run / output)]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error), error


def test_smoothing_is_the_mean_of_neighbours() -> None:
    values = np.random.default_rng(0).standard_normal(100)
    smoothed = smooth(values, 0.04)
    assert smoothed[50] == pytest.approx(values[46:55].mean())
    assert smoothed[2] == pytest.approx(values[0:5].mean())
    assert smoothed[0] == values[0]
    assert smooth(values, 0.0) == pytest.approx(values)
