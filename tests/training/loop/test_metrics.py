"""Metrics are read back whole, and the alarm is raised for runs that learn no context alone."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from tests.training.support import read_metrics
from training.loop.metrics import MetricsWriter
from training.loop.plateau import PlateauAlarm


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """TensorBoard's steps and values of a run, by tag."""
    accumulator = EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }


def test_tensorboard_has_the_same_figures(tmp_path: Path) -> None:
    with closing(MetricsWriter(tmp_path, step=0)) as metrics:
        metrics.write(step=5, tokens=640, **{"fill-mask/loss": 9.5})
        metrics.write(step=10, tokens=1280, **{"fill-mask/loss": 8.25})
        metrics.write(step=10, **{"validation/fill-mask/loss": 8.5})
        assert events(tmp_path)["fill-mask/loss"] == [(5, 9.5), (10, 8.25)]  # at once
    assert events(tmp_path) == {
        "tokens": [(5, 640), (10, 1280)],
        "fill-mask/loss": [(5, 9.5), (10, 8.25)],
        "validation/fill-mask/loss": [(10, 8.5)],
    }


def test_a_resumed_run_replaces_the_lines_of_lost_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorBoard orders the files of runs by their second; here its clock counts its calls."""
    clock = SimpleNamespace(time=partial(next, count(1_700_000_000)))
    monkeypatch.setattr("tensorboard.summary.writer.event_file_writer.time", clock)
    with closing(MetricsWriter(tmp_path, step=0)) as metrics:
        for step in (10, 20, 30, 40):
            metrics.write(step=step, loss=float(step))
    with closing(MetricsWriter(tmp_path, step=20)) as metrics:
        metrics.write(step=25, loss=25.5)
    with closing(MetricsWriter(tmp_path, step=25)) as metrics:
        metrics.write(step=30, loss=30.5)
    expected = [(10, 10.0), (20, 20.0), (25, 25.5), (30, 30.5)]
    assert [(line["step"], line["loss"]) for line in read_metrics(tmp_path)] == expected
    assert events(tmp_path) == {"loss": expected}


@pytest.mark.parametrize(
    "damage",
    ['{"st', '{"step": 3, "loss": 0.5', "\x00\x00\x00", "[3]", '{"step": null}'],
)
def test_a_truncated_line_is_removed(tmp_path: Path, damage: str) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n' + damage)
    with closing(MetricsWriter(tmp_path, step=5)) as metrics:
        metrics.write(step=6)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 6]


def test_every_figure_is_one_line_of_strict_json(tmp_path: Path) -> None:
    metrics = MetricsWriter(tmp_path, step=0)
    names = st.text(st.characters(codec="utf-8"), min_size=1).filter(lambda name: name != "step")

    @settings(deadline=None)
    @given(st.dictionaries(names, st.floats() | st.integers(-(2**53), 2**53)))
    @example({"self": 1.0, "NaN": math.nan, "line\nfeed": math.inf})
    def check(figures: dict[str, float]) -> None:
        (tmp_path / "metrics.jsonl").unlink(missing_ok=True)
        metrics.write(step=1, **figures)
        content = (tmp_path / "metrics.jsonl").read_text()
        assert content.count("\n") == 1
        line = json.loads(content, parse_constant=pytest.fail)
        assert line.keys() == {"step", *figures}
        for name, value in figures.items():
            is_finite = math.isfinite(value)
            expected = pytest.approx(value, rel=1e-5, abs=1e-300) if is_finite else None
            assert line[name] == expected

    check()


ENTROPY = 6.835
Curve = Callable[[float], float]


@dataclass(frozen=True, kw_only=True)
class Course:
    """Reports of a run: every so many steps the loss of a curve over steps, with noise."""

    num_steps: int = 7000
    report_every: int = 50
    warmup: float = 0.03
    noise: float = 0.03
    seed: int = 0

    def alarms(self, curve: Curve) -> list[tuple[int, str]]:
        """The steps at which the alarm says something, and what."""
        alarm = PlateauAlarm(unigram_entropy=ENTROPY, warmup=self.warmup)
        rng = np.random.default_rng(self.seed)
        alarms = []
        for step in range(self.report_every, self.num_steps + 1, self.report_every):
            loss = curve(step) + self.noise * rng.standard_normal()
            accuracy = 0.12 if loss > 0.9 * ENTROPY else 0.3
            message = alarm.add(
                step=step, progress=step / self.num_steps, loss=loss, accuracy=accuracy
            )
            if message is not None:
                alarms.append((step, message))
        return alarms


def through(*points: tuple[float, float]) -> Curve:
    """A curve that goes straight from point to point, (step, loss), and stays at the last."""
    steps, losses = zip(*points, strict=True)
    return lambda step: float(np.interp(step, steps, losses))


# Measured curves (docs/decisions.md), and made up ones.
LEARNING: dict[str, Curve] = {
    "small, from local": through((0, 6.85), (100, 6.6), (200, 6.26), (400, 5.89), (7000, 4.8)),
    "from the start": through((0, 9.4), (50, 7.0), (500, 6.0), (7000, 3.5)),
    "slowly but steadily": through((0, 6.9), (5000, 3.0)),
    "large vocabulary, slow at first": through((0, 10.3), (2500, 6.5), (7000, 2.5)),
    "that stands still lower": through((0, 6.9), (400, 6.0), (7000, 6.0)),
}
STUCK: dict[str, Curve] = {
    "at the entropy": through((0, 9.4), (100, 6.84)),
    "at the entropy less copying": through((0, 9.4), (100, 6.84), (600, 6.4)),
    "slowly down to copying": through((0, 6.87), (400, 6.67), (1000, 6.55), (1900, 6.42)),
    "lower rates, to no avail": through((0, 6.5), (300, 6.42), (475, 6.38)),
    "above the entropy": through((0, 9.4), (100, 7.2)),
}


@pytest.mark.parametrize("curve", LEARNING.values(), ids=LEARNING)
@pytest.mark.parametrize("report_every", [5, 200])
def test_a_run_that_learns_is_left_in_peace(curve: Curve, report_every: int) -> None:
    assert not Course(report_every=report_every).alarms(curve)


@pytest.mark.parametrize("curve", STUCK.values(), ids=STUCK)
@pytest.mark.parametrize("report_every", [5, 200])
def test_a_plateau_is_reported_once(curve: Curve, report_every: int) -> None:
    alarms = Course(report_every=report_every).alarms(curve)
    assert len(alarms) == 1
    assert alarms[0][0] <= 3500


@given(
    noise=st.floats(0, 0.1),
    seed=st.integers(0, 2**32),
    ratio=st.floats(0.935, 1.1),
    report_every=st.integers(10, 100),
)
def test_noise_neither_hides_nor_repeats_a_plateau(
    noise: float, seed: int, ratio: float, report_every: int
) -> None:
    course = Course(noise=noise, seed=seed, report_every=report_every)
    assert len(course.alarms(lambda step: ratio * ENTROPY)) == 1
