"""A run reports, saves and stops when it shall, keeps the best, and resumes to the same weights."""

from __future__ import annotations

import json
import math
import os
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from tests.training.loop.stub import CONFIG, TASK, Killed, Stub, kill, train
from tests.training.processes import (
    all_of,
    before_step,
    die,
    lead_a_group,
    run_in_process,
    signal_group,
)
from tests.training.support import (
    best_step,
    checkpoint_state,
    equal,
    file_contents,
    our_model,
    read_metrics,
    same_weights,
    validations,
)
from training.errors import RunError
from training.loop.early_stopping import BestValidation
from training.loop.metrics import MetricsWriter
from training.loop.progress import Progress, contains_run
from training.loop.step import Mixture
from training.model.checkpoint import read_weights
from training.model.provenance import read_stages
from training.optim.optimizers import Schedule
from training.system.process import StopFlag

OFTEN = ("--save-every", "0.0001s")
NEVER = ("--save-every", "10h")
STEPS = list(range(1, 9))
terminate = partial(os.kill, os.getpid(), signal.SIGTERM)


def steps_saved(folder: Path) -> list[int]:
    return [int(path.name[5:]) for path in sorted((folder / "checkpoints").glob("step-*"))]


def check_same(folder: Path, whole: Path) -> None:
    assert same_weights(folder, whole)
    assert [line["step"] for line in read_metrics(folder)] == STEPS


@pytest.mark.parametrize("saving", [OFTEN, NEVER], ids=["often", "never"])
def test_a_killed_run_ends_with_the_same_weights(
    tiny: Path, tiny_options: list[str], tmp_path: Path, saving: tuple[str, str]
) -> None:
    """However often it dies; it has dropout, and two passes a step."""
    folder = tmp_path / "run"
    for step in (1, 2, 3, 3, 8):
        ended = run_in_process(tiny_options, folder, *saving, fate=partial(before_step, step, die))
        assert ended.status == -signal.SIGKILL
    ended = run_in_process(tiny_options, folder, *saving)
    assert ended.status == 0
    assert f"Resuming from step {7 if saving is OFTEN else 0}.\n" in ended.out
    check_same(folder, tiny)


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


def test_a_run_is_trained_by_one_command_at_a_time(tmp_path: Path) -> None:
    def train_twice() -> None:
        with pytest.raises(RunError, match=f"Another process is training the run in {tmp_path}"):
            train(tmp_path)

    assert train(tmp_path, Stub(before={2: train_twice})).status == 0


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the stub's run of 8 steps, never interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    assert train(folder).status == 0
    return folder


def test_a_run_reports_saves_and_validates_when_it_is_due(tmp_path: Path) -> None:
    """It saves once more than a second has passed: a step takes half of one."""
    stub = Stub(accuracies={3: 0.25})
    trained = train(tmp_path, stub, report_every=3, validate_every=3, save_every=1.0)
    assert (trained.status, trained.num_steps) == (0, 8)
    assert trained.best == trained.checkpoint == tmp_path / "checkpoint"
    assert steps_saved(tmp_path) == [0, 3, 6, 8]
    lines = read_metrics(tmp_path)
    assert [(line["step"], line["tokens"], line["elapsed_s"]) for line in lines] == [
        (3, 192, 1.5), (3, 192, 1.5), (6, 384, 3.0), (6, 384, 3.0), (8, 512, 4.0)
    ]  # fmt: skip
    assert [line["tokens_per_s"] for line in lines[::2][:2]] == [128, 128]
    assert [line.get("validation/text-classification/accuracy") for line in lines] == [
        None, 0.25, None, 0.5, 0.5
    ]  # fmt: skip
    assert trained.validations == [lines[1], lines[3], lines[4]]
    done = {"steps": 8, "tokens": 512, "seconds": 4, "tasks": ["text-classification"]}
    (stage,) = read_stages(tmp_path / "checkpoint")
    assert stage.items() >= done.items()


def test_the_gradient_is_that_of_the_mean_loss_of_all_micro_batches(tmp_path: Path) -> None:
    config = replace(CONFIG, hidden_dropout=0.0, attention_dropout=0.0)
    train(tmp_path, config=config, num_steps=1)
    model, stub = our_model(config, (TASK,)).train(), Stub()
    losses = [stub.loss(model, batch)[TASK].loss for batch in stub.step()]
    mean = torch.stack(losses).sum() / 8
    mean.backward()  # type: ignore[no-untyped-call]
    norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    (line,) = read_metrics(tmp_path)
    assert line["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert line["text-classification/loss"] == pytest.approx(mean.item(), rel=1e-4)


def test_streams_are_drawn_by_their_weights() -> None:
    streams, rng = [Stub(name="often"), Stub(name="seldom")], np.random.default_rng(0)
    mixture = Mixture(streams=streams, weights=[3.0, 1.0], loss_weights={})
    names = Counter(mixture.draw(rng).name for _ in range(4000))
    assert names["often"] == pytest.approx(3000, abs=100)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_ends_the_run_after_its_step(
    whole: Path, tmp_path: Path, number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    stub = Stub(before={3: partial(os.kill, os.getpid(), number)})
    if number == signal.SIGINT:
        with pytest.raises(KeyboardInterrupt, match="Stopped after step 3, which is saved"):
            train(tmp_path, stub)
    else:
        assert train(tmp_path, stub).status == 128 + number
    assert "Stopped at 37.5%. Repeat the command to resume.\n" in "".join(capsys.readouterr())
    assert steps_saved(tmp_path) == [0, 3]
    assert train(tmp_path).status == 0
    assert "Resuming from step 3.\n" in capsys.readouterr().out
    check_same(tmp_path, whole)


def test_a_second_signal_ends_the_process_once_the_echo_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A scheduler's signal comes twice: to a process, and through torchrun."""
    previous = signal.getsignal(signal.SIGTERM)
    seconds = iter((10.0, 14.9, 15.0))
    clock = SimpleNamespace(monotonic=partial(next, seconds))
    monkeypatch.setattr("training.system.process.time", clock)
    with StopFlag(echo_s=5.0) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.signal == signal.SIGTERM
        with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
            os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is previous


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_not_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four in a row end no run; nor are weights between them validated, or saved amidst."""
    stub = Stub(spoiled=range(3, 7), before={3: terminate})
    train(tmp_path / "before", Stub(before={2: terminate}))
    assert train(tmp_path / "run", stub, save_every=0).status == 128 + signal.SIGTERM
    states = [checkpoint_state(tmp_path / name)["optimizers"] for name in ("before", "run")]
    weights = [read_weights(tmp_path / name / "checkpoint") for name in ("before", "run")]
    assert equal(*states)
    assert equal(*weights)
    ended = train(tmp_path / "run", replace(stub, before={}), save_every=0, validate_every=1)
    assert ended.status == 0
    said = "".join(capsys.readouterr())
    assert said.count(": its gradient is not finite.\n") == 4
    assert steps_saved(tmp_path / "run") == [0, 1, 2, 3, 7, 8]
    lines = [line for line in read_metrics(tmp_path / "run") if "lr_factor" in line]
    assert [line["step"] for line in lines] == STEPS
    assert [line.get("skipped", 0) for line in lines] == [0, 0, 1, 2, 3, 4, 4, 4]
    assert [line["step"] for line in lines if "grad_norm" not in line] == [3, 4, 5, 6]
    assert {line["step"] for line in read_metrics(tmp_path / "run")[3:] if len(line) < 6} == {7, 8}


def test_a_gradient_that_stays_not_finite_ends_the_run(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"not finite in 5 consecutive steps. Start a new run"):
        train(tmp_path, Stub(spoiled=(1, *range(4, 9))), save_every=0)
    assert steps_saved(tmp_path) == [0, 2, 3]
    assert not same_weights(tmp_path, whole)  # its first step was skipped
    assert train(tmp_path).status == 0  # the run is intact
    assert checkpoint_state(tmp_path)["stability"]["num_skipped"] == 1


def test_a_budget_is_the_length_of_the_schedule(tmp_path: Path) -> None:
    """Also over a kill: the seconds up to the last checkpoint count."""
    budget: dict[str, Any] = {"num_steps": None, "budget_s": 10.0}
    assert train(tmp_path / "whole", **budget).status == 0
    schedule = Schedule(warmup=0.0, decay=0.5)
    factors = [line["lr_factor"] for line in read_metrics(tmp_path / "whole")]
    assert factors == pytest.approx([schedule.factor(n / 20) for n in range(20)], rel=1e-5)
    assert checkpoint_state(tmp_path / "whole")["elapsed_s"] == 10
    with pytest.raises(Killed):
        train(tmp_path / "run", Stub(before={13: kill}), save_every=0, **budget)
    assert train(tmp_path / "run", **budget).status == 0
    assert same_weights(tmp_path / "run", tmp_path / "whole")
    assert [line["elapsed_s"] for line in read_metrics(tmp_path / "run")][-2:] == [9.5, 10]


def test_progress_is_that_of_the_nearer_end() -> None:
    assert Progress(num_steps=0, budget_s=None).done == 1.0
    assert Progress(num_steps=10, budget_s=100, step=3, elapsed_s=25).done == 0.3
    assert Progress(num_steps=10, budget_s=100, step=3, elapsed_s=75).done == 0.75
    assert Progress(num_steps=10, budget_s=None, step=12).done == 1.0


def test_a_folder_of_another_run_is_rejected(tmp_path: Path) -> None:
    """Settings of the end may change, and those that the record lacks."""
    record = {"seed": 1, "steps": 8, "data": {"files": ["a"], "columns": None}}
    assert not contains_run(tmp_path, record)
    (tmp_path / "run.json").write_text(json.dumps(record))
    assert contains_run(tmp_path, {**record, "steps": 9, "added": True})
    other = {"seed": 2, "data": {"files": ["b"], "columns": None}}
    with pytest.raises(RunError, match=r"seed 1, not 2; files \['a'\], not \['b'\]\. "):
        contains_run(tmp_path, other)


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

    At step 0 the run begins again, without any of them.
    """
    clock = SimpleNamespace(time=partial(next, count(1_700_000_000)))
    monkeypatch.setattr("tensorboard.summary.writer.event_file_writer.time", clock)
    with closing(MetricsWriter(tmp_path, step=0)) as metrics:
        for step in (0, 10, 20, 30, 40):
            metrics.write(step=step, loss=float(step))
        assert events(tmp_path)["loss"][-1] == (40, 40.0)  # at once
    with closing(MetricsWriter(tmp_path, step=20)) as metrics:
        metrics.write(step=21, loss=25.5)
    with closing(MetricsWriter(tmp_path, step=21)) as metrics:
        metrics.write(step=30, loss=30.5, **{"validation/loss": 31.0})
    expected = [(0, 0.0), (10, 10.0), (20, 20.0), (21, 25.5), (30, 30.5)]
    assert [(line["step"], line["loss"]) for line in read_metrics(tmp_path)] == expected
    assert events(tmp_path) == {"loss": expected, "validation/loss": [(30, 31.0)]}
    with closing(MetricsWriter(tmp_path, step=0)) as metrics:
        metrics.write(step=1, loss=1.0)
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 1.0}]
    assert events(tmp_path) == {"loss": [(1, 1.0)], "validation/loss": []}


@pytest.mark.parametrize("damage", ['{"step": 3, "loss": 0.5', "\x00\x00\x00", '{"step": null}'])
def test_a_truncated_line_is_removed(tmp_path: Path, damage: str) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n' + damage)
    with closing(MetricsWriter(tmp_path, step=5)) as metrics:
        metrics.write(step=6)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 6]


def selection(patience: int | None = None, criterion: str = "accuracy of these") -> BestValidation:
    return BestValidation(metric="accuracy", criterion=criterion, patience=patience)


@pytest.mark.parametrize(
    ("metric", "values", "best_steps"),
    [
        ("accuracy", [0.5, 0.7, 0.7, 0.6, 0.8], [1, 2, 2, 2, 5]),
        ("loss", [0.5, 0.7, 0.4, 0.4], [1, 1, 3, 3]),
        ("mse", [0.5, 0.7], [1, 1]),
        ("pearson", [math.nan, -0.1, math.nan, 0.1], [None, 2, 2, 4]),
    ],
)
def test_the_first_of_the_best(
    metric: str, values: list[float], best_steps: list[int | None]
) -> None:
    """And patience is at its end after two validations that are not better."""
    selected = BestValidation(metric=metric, patience=2)
    for step, (value, expected) in enumerate(zip(values, best_steps, strict=True), start=1):
        is_best = selected.update(step, {metric: value, "other": 9.0})
        assert selected.best_step == expected
        assert is_best == (expected == step)
        assert selected.stops_early == (step - (expected or 0) >= 2)


def test_patience_ends_a_run_and_a_larger_one_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The best weights stay, however many checkpoints come after; the end is validated once."""
    stub = Stub(accuracies={2: 0.5, 3: 0.75, 8: 0.875})
    options: dict[str, Any] = {"num_steps": 10, "validate_every": 1, "keep": 1}
    trained = train(tmp_path, stub, selection=selection(2), **options)
    assert (trained.status, trained.num_steps, trained.best) == (0, 2, tmp_path / "best")
    said = "".join(capsys.readouterr())
    assert "Stopped early at 20.0%, after 2 validations without a better one. To cont" in said
    assert "/best: accuracy 0.5000, of the weights before the first step" in said
    assert best_step(tmp_path) == 0
    trained = train(tmp_path, stub, selection=selection(3), **options)
    assert (trained.num_steps, best_step(tmp_path)) == (6, 3)
    assert "Stopped early at 60.0%" in "".join(capsys.readouterr())
    train(tmp_path, stub, **options)  # without selection: the best stays
    assert best_step(tmp_path) == 3
    trained = train(tmp_path, stub, selection=selection(9), **options | {"num_steps": 11})
    said = "".join(capsys.readouterr())
    assert "/best: accuracy 0.7500 at step 3.\n" in said
    assert "Stopped early" not in said
    assert list(validations(tmp_path, TASK, "accuracy")) == list(range(12))
    with pytest.raises(RunError, match="by accuracy of these, not accuracy of those"):
        train(tmp_path, stub, selection=selection(3, "accuracy of those"), **options)


@pytest.mark.parametrize("happens", [kill, terminate], ids=["killed", "stopped"])
@pytest.mark.parametrize("step", [2, 5])
def test_a_run_that_ends_in_a_validation_goes_on_as_one_that_does_not(
    tmp_path: Path, happens: Callable[[], None], step: int
) -> None:
    """In its last one, too. What was validated is not validated again."""
    accuracies = {0: 0.6, 2: 0.7, 4: 0.6, 5: 0.8}
    options: dict[str, Any] = {"num_steps": 5, "validate_every": 2, "save_every": 0.0}
    whole, ended = tmp_path / "whole", tmp_path / "ended"
    train(whole, Stub(accuracies=accuracies), selection=selection(), **options)
    stub = Stub(accuracies=accuracies, in_validation={step: happens})
    if happens is kill:
        with pytest.raises(Killed):
            train(ended, stub, selection=selection(), **options)
    else:
        assert train(ended, stub, selection=selection(), **options).status == 143
    assert best_step(ended) == (0 if step == 2 else 2)
    train(ended, Stub(accuracies=accuracies), selection=selection(), **options)
    assert same_weights(ended, whole)
    assert best_step(ended) == best_step(whole) == 5
    assert (
        validations(ended, TASK, "accuracy") == validations(whole, TASK, "accuracy") == accuracies
    )
    before = file_contents(ended / "checkpoints")
    again = Stub(accuracies=accuracies, in_validation={5: kill})
    assert train(ended, again, selection=selection(), **options).status == 0
    assert file_contents(ended / "checkpoints") == before
