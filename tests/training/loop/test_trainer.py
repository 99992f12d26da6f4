"""A run that was killed, stopped or measured ends as one that was not, and when it shall."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
from contextlib import closing
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from tests.training.processes import (
    all_of,
    before_step,
    count_time,
    die,
    get_signals,
    kill_workers,
    lead_a_group,
    run_in_process,
    signal_group,
    spoil,
)
from tests.training.support import (
    checkpoint_state,
    equal,
    hf_load,
    moved,
    read_metrics,
    same_weights,
)
from training.errors import RunError
from training.loop.metrics import MetricsWriter
from training.loop.progress import Progress, is_known_run
from training.optim.optimizers import Schedule
from training.options import values
from training.system.process import StopFlag

OFTEN = ("--save-every", "0.0001s")
NEVER = ("--save-every", "10h")
STEPS = list(range(1, 9))


def check_same(folder: Path, tiny: Path) -> None:
    assert same_weights(folder, tiny)
    assert [line["step"] for line in read_metrics(folder)] == STEPS


@pytest.mark.parametrize("saving", [OFTEN, NEVER], ids=["often", "never"])
def test_a_killed_run_ends_with_the_same_weights(
    tiny: Path,
    tiny_options: list[str],
    tmp_path: Path,
    saving: tuple[str, str],
) -> None:
    """However often it dies; it has dropout, and two passes a step."""
    folder = tmp_path / "run"
    for step in (1, 2, 3, 3, 8):
        ended = run_in_process(tiny_options, folder, *saving, fate=partial(before_step, step, die))
        assert ended.status == -signal.SIGKILL
    ended = run_in_process(tiny_options, folder, *saving)
    assert ended.status == 0
    assert f"resuming from step {7 if saving is OFTEN else 0}\n" in ended.out
    check_same(folder, tiny)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_ends_the_run_after_its_step(
    tiny: Path, tiny_options: list[str], tmp_path: Path, number: signal.Signals
) -> None:
    fate = partial(before_step, 3, partial(get_signals, number))
    ended = run_in_process(tiny_options, tmp_path / "run", *NEVER, fate=fate)
    assert (ended.status, ended.err) == (128 + number, "")
    assert "stopped at 37.5%; the same command resumes it\n" in ended.out
    assert checkpoint_state(tmp_path / "run")["step"] == 3
    ended = run_in_process(tiny_options, tmp_path / "run")
    assert ended.status == 0
    assert "resuming from step 3\n" in ended.out
    check_same(tmp_path / "run", tiny)


def test_a_signal_to_the_workers_as_well_ends_the_run_after_its_step(
    tiny: Path, tiny_options: list[str], tmp_path: Path
) -> None:
    """As from a terminal, torchrun, or a scheduler that stops all processes of a job."""
    options = [*tiny_options, "--workers", "1", *NEVER]
    stop = partial(before_step, 3, partial(signal_group, signal.SIGTERM))
    ended = run_in_process(options, tmp_path / "run", fate=partial(all_of, lead_a_group, stop))
    assert (ended.status, ended.err) == (128 + signal.SIGTERM, "")
    assert checkpoint_state(tmp_path / "run")["step"] == 3
    assert run_in_process(options, tmp_path / "run").status == 0
    check_same(tmp_path / "run", tiny)


def test_a_worker_that_dies_ends_the_run_in_one_line(
    tiny: Path, tiny_options: list[str], tmp_path: Path
) -> None:
    options = [*tiny_options, "--workers", "1", *OFTEN]
    ended = run_in_process(options, tmp_path / "run", fate=partial(before_step, 3, kill_workers))
    assert ended.status == 1
    assert ended.err.startswith("error: a process that makes batches has ended: DataLoader worker")
    assert ended.err.endswith("; the same command resumes from the last checkpoint\n")
    assert run_in_process(options, tmp_path / "run").status == 0
    check_same(tmp_path / "run", tiny)


def test_a_gradient_that_is_not_finite_changes_nothing(
    tiny_options: list[str], tmp_path: Path
) -> None:
    """With signals, as no checkpoint is written amidst steps that are left out."""
    folder, states = tmp_path / "run", []
    for last, spoiled in ((2, {9}), (4, {1, 2})):
        stop = partial(before_step, last, partial(get_signals, signal.SIGTERM))
        fate = partial(all_of, stop, partial(spoil, spoiled))
        ended = run_in_process(tiny_options, folder, fate=fate)
        assert ended.status == 128 + signal.SIGTERM
        weights = (folder / "checkpoint" / "model.safetensors").read_bytes()
        states.append([weights, checkpoint_state(folder)["optimizers"]])
    assert ended.out.count(" left out: its gradient is not finite\n") == 2
    assert equal(*states)
    assert run_in_process(tiny_options, folder).status == 0
    lines = read_metrics(folder)
    assert [line["step"] for line in lines] == STEPS
    assert [line.get("skipped", 0) for line in lines] == [0, 0, 1, 2, 2, 2, 2, 2]
    assert ["fill-mask/loss" in line for line in lines] == [step not in (3, 4) for step in STEPS]


def test_gradients_are_clipped(tiny_options: list[str], tmp_path: Path) -> None:
    """Gradients far below AdamW's epsilon hardly change the weights."""
    moved_by = []
    for clip_norm in ("1e-12", "1"):
        options = ("--optimizer", "adamw", "--weight-decay", "0", "--clip-norm", clip_norm)
        folder = tmp_path / clip_norm
        assert run_in_process(tiny_options, folder, *options, "--steps", "3").status == 0
        moved_by.append(moved(folder))
    assert moved_by[0] < moved_by[1] / 100


def test_a_gradient_that_stays_not_finite_ends_the_run(
    tiny: Path, tiny_options: list[str], tmp_path: Path
) -> None:
    fate = partial(spoil, range(4, 9))
    ended = run_in_process(tiny_options, tmp_path / "run", *OFTEN, fate=fate)
    assert ended.status == 1
    assert ended.err == (
        "error: the gradient was not finite for 5 steps in a row; start a new run with lower "
        "rates, from the last checkpoint by --initialize-from\n"
    )
    assert checkpoint_state(tmp_path / "run")["step"] == 3
    assert run_in_process(tiny_options, tmp_path / "run").status == 0  # the run is intact
    check_same(tmp_path / "run", tiny)


@pytest.fixture
def budgeted(tiny_options: list[str]) -> list[str]:
    """A run of 10 seconds, without a number of steps."""
    at = tiny_options.index("--steps")
    rest = [*tiny_options[:at], *tiny_options[at + 2 :]]
    return [*rest, "--budget", "10s", "--schedule", "linear", "--warmup", "0.1"]


def test_a_budget_is_the_length_of_the_schedule(budgeted: list[str], tmp_path: Path) -> None:
    """Also over a kill: the seconds up to the last checkpoint count."""
    tick = partial(count_time, 0.5)
    assert run_in_process(budgeted, tmp_path / "whole", fate=tick).status == 0
    schedule = Schedule(kind="linear", warmup=0.1)
    expected = [schedule.factor(step / 20) for step in range(20)]
    factors = [line["lr_factor"] for line in read_metrics(tmp_path / "whole")]
    assert factors == pytest.approx(expected, rel=1e-5)
    assert factors[-1] == pytest.approx(0.05)
    assert checkpoint_state(tmp_path / "whole")["elapsed_s"] == 10
    hf_load("AlbertForPreTraining", tmp_path / "whole" / "checkpoint")

    dies = partial(all_of, tick, partial(before_step, 13, die))
    assert run_in_process(budgeted, tmp_path / "run", *OFTEN, fate=dies).status == -signal.SIGKILL
    assert run_in_process(budgeted, tmp_path / "run", fate=tick).status == 0
    assert same_weights(tmp_path / "run", tmp_path / "whole")
    assert read_metrics(tmp_path / "run")[-1]["step"] == 20


def test_progress_is_that_of_the_nearer_end() -> None:
    assert Progress(num_steps=0, budget_s=None).done == 1.0
    assert Progress(num_steps=10, budget_s=None, step=3).done == 0.3
    assert Progress(num_steps=None, budget_s=100, elapsed_s=25).done == 0.25
    assert Progress(num_steps=10, budget_s=100, step=3, elapsed_s=25).done == 0.3
    assert Progress(num_steps=10, budget_s=100, step=3, elapsed_s=75).done == 0.75
    assert Progress(num_steps=10, budget_s=None, step=12).done == 1.0


def test_a_second_signal_ends_the_process() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopFlag() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal == signal.SIGTERM
        with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
            os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_damaged_note(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(RunError, match=r"run\.json is not JSON: .*give another --output"):
        is_known_run(tmp_path, {"settings": {}, "files": []})


def test_a_duration_has_a_unit() -> None:
    durations = [values.parse_duration(text) for text in ("90s", "25m", "1.5h")]
    assert durations == [90, 1500, 5400]
    for text in ("", "5", "m", "0s", "infh", "nans", "1d"):
        with pytest.raises(argparse.ArgumentTypeError, match="90s, 25m"):
            values.parse_duration(text)


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
