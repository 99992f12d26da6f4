"""Runs end when they shall, are told apart, and leave no half-written line or file."""

from __future__ import annotations

import argparse
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from training import options
from training.run import (
    MetricsFile,
    Progress,
    RunError,
    StopFlag,
    is_known_run,
    load_state,
    record_run,
    save_state,
)


def test_progress_is_that_of_the_nearer_end() -> None:
    assert Progress(num_steps=10, budget_s=None, step=3).done == 0.3
    assert Progress(num_steps=None, budget_s=100, elapsed_s=25).done == 0.25
    assert Progress(num_steps=10, budget_s=100, step=3, elapsed_s=25).done == 0.3
    assert Progress(num_steps=10, budget_s=100, step=3, elapsed_s=75).done == 0.75
    assert Progress(num_steps=10, budget_s=None, step=12).done == 1.0


def test_the_clock_runs_from_its_start() -> None:
    progress = Progress(num_steps=None, budget_s=1000, elapsed_s=5)
    assert progress.seconds == 5
    progress.start_clock()
    assert progress.seconds > 5


def test_a_run_needs_an_end() -> None:
    with pytest.raises(RunError, match="give --steps or --budget"):
        Progress(num_steps=None, budget_s=None)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_sets_the_flag_and_a_second_one_ends(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopFlag() as stop:
        assert stop.signal is None
        os.kill(os.getpid(), number)
        assert stop.signal == number
        with pytest.raises(SystemExit, match=str(128 + number)):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_metrics_are_lines_of_rounded_numbers(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    MetricsFile(file, step=0).write(step=1, loss=1.23456789)
    MetricsFile(file, step=1).write(step=2, loss=1e-9)
    assert file.read_text() == '{"step": 1.0, "loss": 1.23457}\n{"step": 2.0, "loss": 1e-09}\n'


def test_metrics_of_a_part_that_was_lost_are_taken_out(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    MetricsFile(file, step=2).write(step=3)
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1, 2, 3]


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


def test_states_are_whole_or_refused(tmp_path: Path) -> None:
    file = tmp_path / "state.pt"
    assert load_state(file) is None
    save_state(file, {"step": 3, "weights": torch.arange(1000)})
    state = load_state(file)
    assert state is not None
    assert state["step"] == 3
    assert [each.name for each in tmp_path.iterdir()] == ["state.pt"]
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(RunError, match=r"state\.pt cannot be read"):
        load_state(file)


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (options.parse_duration, "90s", 90.0),
        (options.parse_duration, "25m", 1500.0),
        (options.parse_duration, "1.5h", 5400.0),
        (options.parse_count, "7", 7),
        (options.parse_seed, "0", 0),
        (options.parse_positive, "1e-3", 0.001),
        (options.parse_part, "0", 0.0),
        (options.parse_part, "1", 1.0),
    ],
)
def test_options_that_are_well_written(
    parse: Callable[[str], float], text: str, value: float
) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "texts", "message"),
    [
        (options.parse_duration, ["", "5", "m", "-1s", "0s", "infh", "nans", "1d"], "90s, 25m"),
        (options.parse_count, ["", "0", "-1", "1.5", "x"], "no whole number from 1"),
        (options.parse_seed, ["-1", "x"], "no whole number from 0"),
        (options.parse_positive, ["0", "-1", "nan", "inf", "x"], "no number above 0"),
        (options.parse_part, ["-0.1", "1.1", "nan", "x"], "no number from 0 to 1"),
    ],
)
def test_options_that_are_not(
    parse: Callable[[str], float], texts: list[str], message: str
) -> None:
    for text in texts:
        with pytest.raises(argparse.ArgumentTypeError, match=message):
            parse(text)
