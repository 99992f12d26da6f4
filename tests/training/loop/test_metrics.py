"""Metrics are one line of JSON each and TensorBoard's events, also of a run that was resumed."""

from __future__ import annotations

import json
import math
from contextlib import closing
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from tests.training.support import read_metrics
from training.loop.metrics import MetricsWriter


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """TensorBoard's steps and values of a run, by tag."""
    accumulator = EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }


def test_a_resumed_run_replaces_the_lines_of_lost_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in TensorBoard, which orders the files of runs by their second: here calls are counted.

    It has what is validated, too.
    """
    clock = SimpleNamespace(time=partial(next, count(1_700_000_000)))
    monkeypatch.setattr("tensorboard.summary.writer.event_file_writer.time", clock)
    with closing(MetricsWriter(tmp_path, step=0)) as metrics:
        for step in (10, 20, 30, 40):
            metrics.write(step=step, loss=float(step))
        assert events(tmp_path)["loss"][-1] == (40, 40.0)  # at once
    with closing(MetricsWriter(tmp_path, step=20)) as metrics:
        metrics.write(step=25, loss=25.5)
    with closing(MetricsWriter(tmp_path, step=25)) as metrics:
        metrics.write(step=30, loss=30.5, **{"validation/loss": 31.0})
    expected = [(10, 10.0), (20, 20.0), (25, 25.5), (30, 30.5)]
    assert [(line["step"], line["loss"]) for line in read_metrics(tmp_path)] == expected
    assert events(tmp_path) == {"loss": expected, "validation/loss": [(30, 31.0)]}


@pytest.mark.parametrize(
    "damage", ['{"step": 3, "loss": 0.5', "\x00\x00\x00", "[3]", '{"step": null}']
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
