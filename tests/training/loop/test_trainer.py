"""A run reports, saves, validates and stops on time, and resumes to the same weights."""

from __future__ import annotations

import json
import math
import os
import signal
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from tests.training.loop.stub import CONFIG, TASK, Killed, Stub, kill, train
from tests.training.processes import (
    SAVE_OFTEN,
    before_step,
    kill_self,
    run_all,
    run_in_process,
    signal_group,
    start_process_group,
)
from tests.training.support import (
    best_step,
    check_same,
    checkpoint_state,
    file_contents,
    our_model,
    read_metrics,
    read_validations,
    same_weights,
    saved_steps,
    values_are_equal,
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

Capture = pytest.CaptureFixture[str]
SAVE_NEVER = ("--save-every", "10h")
terminate = partial(os.kill, os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("saving", [SAVE_OFTEN, SAVE_NEVER], ids=["often", "never"])
def test_a_killed_run_ends_with_the_same_weights(
    tiny_run: Path, tiny_options: list[str], tmp_path: Path, saving: tuple[str, str]
) -> None:
    """It is killed five times. It has dropout, and two passes per step."""
    folder = tmp_path / "run"
    for step in (1, 2, 3, 3, 8):
        hook = partial(before_step, step, kill_self)
        ended = run_in_process(tiny_options, folder, *saving, hook=hook)
        assert ended.status == -signal.SIGKILL
    ended = run_in_process(tiny_options, folder, *saving)
    assert ended.status == 0
    assert f"Resuming from step {7 if saving is SAVE_OFTEN else 0}.\n" in ended.out
    check_same(folder, tiny_run)


def test_a_signal_to_the_run_and_its_workers_ends_the_run_after_the_step(
    tiny_run: Path, tiny_options: list[str], tmp_path: Path
) -> None:
    """A terminal, torchrun and some schedulers signal all processes of a job."""
    options = [*tiny_options, "--workers", "1", *SAVE_NEVER]
    stop = partial(before_step, 3, partial(signal_group, signal.SIGTERM))
    hook = partial(run_all, start_process_group, stop)
    ended = run_in_process(options, tmp_path / "run", hook=hook)
    assert (ended.status, ended.err) == (128 + signal.SIGTERM, "")
    assert checkpoint_state(tmp_path / "run")["step"] == 3
    assert run_in_process(options, tmp_path / "run").status == 0
    check_same(tmp_path / "run", tiny_run)


def test_only_one_command_at_a_time_can_train_a_run(tmp_path: Path) -> None:
    def train_again() -> None:
        with pytest.raises(RunError, match=f"Another process is training the run in {tmp_path}"):
            train(tmp_path)

    assert train(tmp_path, Stub(before={2: train_again})).status == 0


def test_steps_on_masked_tokens_leave_the_sentence_order_head_unchanged(
    tiny_options: list[str], tmp_path: Path
) -> None:
    """Neither weight decay nor the optimizer's moments of earlier steps on pairs change it."""
    options = [*tiny_options, *SAVE_OFTEN, "--keep", "9", "--order-share", "0.5"]
    assert run_in_process(options, tmp_path / "run", "--order-sentences", "1").status == 0
    checkpoints = sorted((tmp_path / "run" / "checkpoints").iterdir())
    weights = [read_weights(checkpoint) for checkpoint in checkpoints]
    # A pair in both orders can give the bias a gradient of exactly 0.
    names = ["albert.pooler.weight", "sop_classifier.classifier.weight"]
    are_masked = ["fill-mask/loss" in line for line in read_metrics(tmp_path / "run")]
    assert (True, False) in pairwise(are_masked)
    assert (False, True) in pairwise(are_masked)
    for is_masked, (before, after) in zip(are_masked, pairwise(weights), strict=True):
        assert {torch.equal(before[name], after[name]) for name in names} == {is_masked}


def test_a_run_reports_saves_and_validates_at_the_set_intervals(tmp_path: Path) -> None:
    """A step takes half a second. The run saves after more than a second."""
    stub = Stub(accuracies={3: 0.25})
    trained = train(tmp_path, stub, report_every=3, validate_every=3, save_every=1.0)
    assert (trained.status, trained.num_steps) == (0, 8)
    assert trained.best == trained.checkpoint == tmp_path / "checkpoint"
    assert saved_steps(tmp_path) == [0, 3, 6, 8]
    lines = read_metrics(tmp_path)
    assert [(line["step"], line["tokens"], line["elapsed_s"]) for line in lines] == [
        (3, 192, 1.5), (3, 192, 1.5), (6, 384, 3.0), (6, 384, 3.0), (8, 512, 4.0)
    ]  # fmt: skip
    assert [line["tokens_per_s"] for line in lines[::2][:2]] == [128, 128]
    assert [line.get("validation/text-classification/accuracy") for line in lines] == [
        None, 0.25, None, 0.5, 0.5
    ]  # fmt: skip
    assert trained.validations == [lines[1], lines[3], lines[4]]
    expected = {"steps": 8, "tokens": 512, "seconds": 4, "tasks": ["text-classification"]}
    (stage,) = read_stages(tmp_path / "checkpoint")
    assert stage.items() >= expected.items()


def test_a_step_has_the_gradient_of_the_mean_loss_over_all_micro_batches(tmp_path: Path) -> None:
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
def test_a_signal_ends_the_run_after_the_step(
    tmp_path: Path, number: signal.Signals, capsys: Capture
) -> None:
    run, stub = tmp_path / "run", Stub(before={3: partial(os.kill, os.getpid(), number)})
    if number == signal.SIGINT:
        with pytest.raises(KeyboardInterrupt, match="Stopped after step 3, which is saved"):
            train(run, stub)
    else:
        assert train(run, stub).status == 128 + number
    assert "Stopped at 37.5%. Repeat the command to resume.\n" in "".join(capsys.readouterr())
    assert saved_steps(run) == [0, 3]
    assert train(run).status == 0
    assert "Resuming from step 3.\n" in capsys.readouterr().out
    assert train(tmp_path / "uninterrupted").status == 0
    check_same(run, tmp_path / "uninterrupted")


def test_a_second_signal_after_the_echo_time_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A scheduler's signal can arrive twice within `echo_s`: directly, and through torchrun."""
    handler = signal.getsignal(signal.SIGTERM)
    seconds = iter((10.0, 14.9, 15.0))
    clock = SimpleNamespace(monotonic=partial(next, seconds))
    monkeypatch.setattr("training.system.process.time", clock)
    with StopFlag(echo_s=5.0) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.signal == signal.SIGTERM
        with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
            os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_step_whose_gradient_is_not_finite_is_skipped(tmp_path: Path, capsys: Capture) -> None:
    """The weights are then neither validated nor saved. Four skipped steps do not end the run."""
    stub = Stub(spoiled=range(3, 7), before={3: terminate})
    train(tmp_path / "before", Stub(before={2: terminate}))
    assert train(tmp_path / "run", stub, save_every=0).status == 128 + signal.SIGTERM
    states = [checkpoint_state(tmp_path / name)["optimizers"] for name in ("before", "run")]
    weights = [read_weights(tmp_path / name / "checkpoint") for name in ("before", "run")]
    assert values_are_equal(*states)
    assert values_are_equal(*weights)
    trained = train(tmp_path / "run", replace(stub, before={}), save_every=0, validate_every=1)
    assert trained.status == 0
    assert "".join(capsys.readouterr()).count(": its gradient is not finite.\n") == 4
    assert saved_steps(tmp_path / "run") == [0, 1, 2, 3, 7, 8]
    lines = [line for line in read_metrics(tmp_path / "run") if "lr_factor" in line]
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert [line.get("skipped", 0) for line in lines] == [0, 0, 1, 2, 3, 4, 4, 4]
    assert [line["step"] for line in lines if "grad_norm" not in line] == [3, 4, 5, 6]
    assert {line["step"] for line in read_metrics(tmp_path / "run")[3:] if len(line) < 6} == {7, 8}


def test_five_consecutive_skipped_steps_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"not finite in 5 consecutive steps. Start a new run"):
        train(tmp_path, Stub(spoiled=(1, *range(4, 9))), save_every=0)
    assert saved_steps(tmp_path) == [0, 2, 3]
    assert train(tmp_path).status == 0  # the run can be resumed
    assert checkpoint_state(tmp_path)["stability"]["num_skipped"] == 1


def test_the_budget_sets_the_length_of_the_schedule(tmp_path: Path) -> None:
    """After a kill, the time up to the last checkpoint counts."""
    budget: dict[str, Any] = {"num_steps": None, "budget_s": 10.0}
    run, uninterrupted_run = tmp_path / "run", tmp_path / "uninterrupted"
    assert train(uninterrupted_run, **budget).status == 0
    schedule = Schedule(warmup=0.0, decay=0.5)
    factors = [line["lr_factor"] for line in read_metrics(uninterrupted_run)]
    assert factors == pytest.approx([schedule.factor(n / 20) for n in range(20)], rel=1e-5)
    assert checkpoint_state(uninterrupted_run)["elapsed_s"] == 10
    with pytest.raises(Killed):
        train(run, Stub(before={13: kill}), save_every=0, **budget)
    assert train(run, **budget).status == 0
    check_same(run, uninterrupted_run)
    assert [line["elapsed_s"] for line in read_metrics(run)][-2:] == [9.5, 10]


def test_progress_is_the_larger_fraction_of_steps_or_budget() -> None:
    assert Progress(num_steps=0, budget_s=None).done == 1.0
    assert Progress(num_steps=10, budget_s=100, step=3, elapsed_s=25).done == 0.3
    assert Progress(num_steps=10, budget_s=100, step=3, elapsed_s=75).done == 0.75
    assert Progress(num_steps=10, budget_s=None, step=12).done == 1.0


def test_a_folder_of_another_run_is_rejected(tmp_path: Path) -> None:
    """The number of steps may change, and so may settings that the record lacks."""
    record = {"seed": 1, "steps": 8, "data": {"files": ["a"], "columns": None}}
    assert not contains_run(tmp_path, record)
    (tmp_path / "run.json").write_text(json.dumps(record))
    assert contains_run(tmp_path, {**record, "steps": 9, "added": True})
    with pytest.raises(RunError, match=r"seed 1, not 2; files \['a'\], not \['b'\]\. "):
        contains_run(tmp_path, {"seed": 2, "data": {"files": ["b"], "columns": None}})


def tensorboard_events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Read the steps and values of a run from TensorBoard's files, by tag."""
    accumulator = EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }


def test_a_resumed_run_replaces_the_lines_of_lost_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are also replaced in TensorBoard. A run that starts over at step 0 replaces all lines.

    TensorBoard orders files by the second of their creation, so this clock counts its calls.
    """
    clock = SimpleNamespace(time=partial(next, count(1_700_000_000)))
    monkeypatch.setattr("tensorboard.summary.writer.event_file_writer.time", clock)
    folder = tmp_path / "new" / "run"
    with closing(MetricsWriter(folder, step=0)) as metrics:
        for step in (0, 10, 20, 30, 40):
            metrics.write(step=step, loss=float(step))
        assert tensorboard_events(folder)["loss"][-1] == (40, 40.0)  # written immediately
    with closing(MetricsWriter(folder, step=20)) as metrics:
        metrics.write(step=21, loss=25.5)
    with closing(MetricsWriter(folder, step=21)) as metrics:
        metrics.write(step=30, loss=30.5, **{"validation/loss": 31.0})
    expected = [(0, 0.0), (10, 10.0), (20, 20.0), (21, 25.5), (30, 30.5)]
    assert [(line["step"], line["loss"]) for line in read_metrics(folder)] == expected
    assert tensorboard_events(folder) == {"loss": expected, "validation/loss": [(30, 31.0)]}
    with closing(MetricsWriter(folder, step=0)) as metrics:
        metrics.write(step=1, loss=123456.25, tokens=12345678, norm=math.inf)
    assert read_metrics(folder) == [{"step": 1, "loss": 123456, "tokens": 12345678, "norm": None}]
    events = {"loss": [(1, 123456.0)], "tokens": [(1, 12345678.0)], "validation/loss": []}
    assert tensorboard_events(folder) == events


@pytest.mark.parametrize("damage", ['{"step": 3, "loss": 0.5', "\x00\x00\x00", '{"step": null}'])
def test_a_damaged_last_line_of_the_metrics_is_removed(tmp_path: Path, damage: str) -> None:
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
def test_the_first_of_equally_good_validations_is_the_best(
    metric: str, values: list[float], best_steps: list[int | None]
) -> None:
    """With patience 2, the run stops after two validations that are not better."""
    best = BestValidation(metric=metric, patience=2)
    for step, (value, expected) in enumerate(zip(values, best_steps, strict=True), start=1):
        is_best = best.update(step, {metric: value, "other": 9.0})
        assert best.best_step == expected
        assert is_best == (expected == step)
        assert best.stops_early == (step - (expected or 0) >= 2)


def test_a_run_whose_metric_is_never_a_number_ends_with_a_report() -> None:
    best = BestValidation(metric="pearson")
    assert not best.update(1, {"pearson": math.nan})
    assert list(best.report(1.0, Path("best"))) == [
        "The best validation, in best: none has a value of pearson."
    ]


def test_a_run_stops_early_and_resumes_with_more_patience(tmp_path: Path, capsys: Capture) -> None:
    """The best checkpoint is kept. The last step is validated once."""
    stub = Stub(accuracies={2: 0.5, 3: 0.75, 8: 0.875})
    options: dict[str, Any] = {"num_steps": 10, "validate_every": 1, "keep": 1}
    trained = train(tmp_path, stub, selection=selection(2), **options)
    assert (trained.status, trained.num_steps, trained.best) == (0, 2, tmp_path / "best")
    output = "".join(capsys.readouterr())
    assert "Stopped early at 20.0%, after 2 validations without a better one. To cont" in output
    assert "/best: accuracy 0.5000, of the weights before the first step" in output
    assert best_step(tmp_path) == 0
    trained = train(tmp_path, stub, selection=selection(3), **options)
    assert (trained.num_steps, best_step(tmp_path)) == (6, 3)
    assert "Stopped early at 60.0%" in "".join(capsys.readouterr())
    train(tmp_path, stub, **options)  # without selection, the best checkpoint is kept
    assert best_step(tmp_path) == 3
    train(tmp_path, stub, selection=selection(9), **options | {"num_steps": 11})
    output = "".join(capsys.readouterr())
    assert "/best: accuracy 0.7500 at step 3.\n" in output
    assert "Stopped early" not in output
    assert list(read_validations(tmp_path, TASK, "accuracy")) == list(range(12))
    with pytest.raises(RunError, match="by accuracy of these, not accuracy of those"):
        train(tmp_path, stub, selection=selection(3, "accuracy of those"), **options)


@pytest.mark.parametrize("interrupt", [kill, terminate], ids=["killed", "stopped"])
@pytest.mark.parametrize("step", [2, 5])
def test_a_run_interrupted_in_a_validation_resumes_to_the_same_result(
    tmp_path: Path, interrupt: Callable[[], None], step: int
) -> None:
    """Step 5 is the last one. A completed validation is not repeated."""
    accuracies = {0: 0.6, 2: 0.7, 4: 0.6, 5: 0.8}
    uninterrupted_run, run = tmp_path / "uninterrupted", tmp_path / "run"

    def train_run(folder: Path, in_validation: Mapping[int, Callable[[], None]]) -> int:
        stub = Stub(accuracies=accuracies, in_validation=in_validation)
        options: dict[str, Any] = {"num_steps": 5, "validate_every": 2, "save_every": 0.0}
        return train(folder, stub, selection=selection(), **options).status

    assert train_run(uninterrupted_run, {}) == 0
    if interrupt is kill:
        with pytest.raises(Killed):
            train_run(run, {step: interrupt})
    else:
        assert train_run(run, {step: interrupt}) == 143
    assert best_step(run) == (0 if step == 2 else 2)
    assert train_run(run, {}) == 0
    assert same_weights(run, uninterrupted_run)
    for folder in (run, uninterrupted_run):
        assert best_step(folder) == 5
        assert read_validations(folder, TASK, "accuracy") == accuracies
    checkpoints = file_contents(run / "checkpoints")
    assert train_run(run, {5: kill}) == 0
    assert file_contents(run / "checkpoints") == checkpoints
