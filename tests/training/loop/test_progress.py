"""Runs end when they shall, are told apart, and leave no half-written line or file."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from training.errors import RunError
from training.loop.progress import Progress, is_known_run, record_run
from training.options import values
from training.system.signals import StopFlag


def test_progress_is_that_of_the_nearer_end() -> None:
    assert Progress(num_steps=10, budget_s=None, step=3).done == 0.3
    assert Progress(num_steps=None, budget_s=100, elapsed_s=25).done == 0.25
    assert Progress(num_steps=10, budget_s=100, step=3, elapsed_s=25).done == 0.3
    assert Progress(num_steps=10, budget_s=100, step=3, elapsed_s=75).done == 0.75
    assert Progress(num_steps=10, budget_s=None, step=12).done == 1.0


def test_a_run_needs_an_end() -> None:
    with pytest.raises(RunError, match="give --steps or --budget"):
        Progress(num_steps=None, budget_s=None)


def test_a_second_signal_ends_the_process() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopFlag() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal == signal.SIGTERM
        with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
            os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


SETTINGS: dict[str, Any] = {"settings": {"seed": 0, "lr": 0.1, "budget": None}, "files": ["a"]}


def test_a_run_is_known_by_its_settings(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    assert not is_known_run(folder, SETTINGS)
    record_run(folder, SETTINGS)
    assert is_known_run(folder, SETTINGS)
    assert is_known_run(folder, {**SETTINGS, "added": 1})
    with pytest.raises(
        RunError, match=r"holds a run with seed 0, not 1; files \['a'\], not \['b'\]"
    ):
        is_known_run(folder, {"settings": {**SETTINGS["settings"], "seed": 1}, "files": ["b"]})


def test_a_damaged_note(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(RunError, match=r"run\.json is not JSON: .*give another --output"):
        is_known_run(tmp_path, SETTINGS)


@pytest.mark.parametrize(
    ("parse", "texts", "message"),
    [
        (values.parse_duration, ["", "5", "m", "-1s", "0s", "infh", "nans", "1d"], "90s, 25m"),
        (values.parse_count, ["", "0", "-1", "1.5", "x"], "no whole number from 1"),
        (values.parse_positive, ["0", "-1", "nan", "inf", "x"], "no number above 0"),
        (values.parse_part, ["-0.1", "1.1", "nan", "x"], "no number from 0 to 1"),
    ],
)
def test_options_that_are_not(
    parse: Callable[[str], float], texts: list[str], message: str
) -> None:
    for text in texts:
        with pytest.raises(argparse.ArgumentTypeError, match=message):
            parse(text)
