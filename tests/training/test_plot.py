"""The pictures show what the runs recorded; asserted by what is drawn, not by pixels."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from tests.training.support import read_metrics
from training.commands.plot import draw_curves, main
from training.loop.metrics import MetricsWriter

pytestmark = pytest.mark.process

STEPS = range(10, 401, 10)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder as training writes it, with curves made up."""
    folder = tmp_path / "base"
    with closing(MetricsWriter(folder, step=0)) as metrics:
        for step in STEPS:
            known: dict[str, float] = {"tokens": 4000 * step, "elapsed_s": 1.8 * step}
            figures = {"fill-mask/loss": 7 - step / 400, "lr_factor": 1.0, "tokens_per_s": 5000.0}
            metrics.write(step=step, **known, **figures)
            if step % 100 == 0:
                metrics.write(step=step, **known, **{"validation/fill-mask/loss": 7.1})
    (folder / "run.json").write_text(json.dumps({"settings": {}, "unigram_entropy": 6.8}))
    return folder


def panels(figure: Figure) -> dict[str, Axes]:
    return {ax.get_title(): ax for ax in figure.axes}


def points(line: Line2D) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in np.asarray(line.get_xydata())]


def by_label(ax: Axes) -> dict[str, Line2D]:
    lines = {str(line.get_label()): line for line in ax.get_lines()}
    return {label: line for label, line in lines.items() if not label.startswith("_")}


def test_there_is_a_panel_for_each_figure(run: Path) -> None:
    figure = draw_curves([run])
    assert list(panels(figure)) == ["fill-mask/loss", "lr_factor", "tokens_per_s"]
    loss = panels(figure)["fill-mask/loss"]
    assert list(by_label(loss)) == [str(run), f"{run}, held-out", "entropy of tokens"]
    assert points(by_label(loss)[f"{run}, held-out"]) == [(step, 7.1) for step in STEPS[9::10]]
    assert list(np.asarray(by_label(loss)["entropy of tokens"].get_ydata())) == [6.8, 6.8]


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
    figure = draw_curves([run], x=x)
    for name in (str(run), f"{run}, held-out"):
        drawn = points(by_label(figure.axes[0])[name])
        assert drawn[-1][0] == pytest.approx(last)
    assert points(by_label(figure.axes[0])[str(run)])[0][0] == pytest.approx(first)
    assert {ax.get_xlabel() for ax in figure.axes} == {label}


def test_a_real_run_is_drawn_over_another(run: Path, pretrained: Path, tmp_path: Path) -> None:
    figure = draw_curves([run, pretrained])
    drawn = by_label(panels(figure)["fill-mask/loss"])
    lines = [line for line in read_metrics(pretrained) if "fill-mask/loss" in line]
    losses = [(line["step"], line["fill-mask/loss"]) for line in lines]
    assert points(drawn[str(pretrained)]) == [pytest.approx(loss) for loss in losses]
    assert drawn[str(run)].get_color() != drawn[str(pretrained)].get_color()
    assert list(by_label(panels(figure)["grad_norm"])) == [str(pretrained)]
    assert main([str(pretrained), "--output", str(tmp_path / "curves.png")]) == 0
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def write(name: str, content: str) -> Callable[[Path], object]:
    return lambda run: (run / name).write_text(content)


@pytest.mark.parametrize(
    ("happens", "options", "message"),
    [
        (lambda run: (run / "metrics.jsonl").unlink(), [], r"base has no metrics\.jsonl; give"),
        (write("metrics.jsonl", '{"st'), [], r"metrics\.jsonl is empty"),
        (write("metrics.jsonl", "{step\n"), [], r"metrics\.jsonl is damaged"),
        (write("run.json", "[]"), [], r"run\.json is not what a run writes"),
        (write("other", ""), ["--output", "curves.doc"], r"curves\.doc: .*\(supported formats"),
        (write("other", ""), ["--output", "no/curves.png"], "No such file or directory: '.*png"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(
    run: Path,
    happens: Callable[[Path], object],
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    happens(run)
    assert main([str(run), *options]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert re.search(message, error), error
    assert not list(tmp_path.glob("*.png"))
