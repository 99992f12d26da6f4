"""Several processes train as one does, and none goes on without the others."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from tests.training.processes import (
    LOST,
    Ended,
    Fate,
    before_step,
    die,
    get_signals,
    run_in_process,
    run_world,
    torchrun,
)
from tests.training.support import checkpoint_state, moved, read_metrics, same_weights

OFTEN = ("--save-every", "0.0001s")
STEPS = list(range(1, 9))


@pytest.fixture(scope="module")
def options(tiny_options: list[str]) -> list[str]:
    """The tiny run in four passes a step, which two processes share.

    In fp32: sums in another order differ in their last digits, and bf16 has few. Without dropout,
    whose masks depend on the process and the micro-batch.
    """
    options = [*tiny_options, "--micro-batch-size", "2", "--precision", "fp32"]
    return [*options, "--dropout", "v2"]


def check_ended(ended: list[Ended], status: int = 0) -> None:
    assert [each.status for each in ended] == [status] * len(ended), [each.err for each in ended]


def check_close(one: Path, other: Path, *, weights: float, losses: float) -> None:
    """Two runs have the same curves, and end with the same weights, up to their last digits."""
    lines = [read_metrics(folder) for folder in (one, other)]
    assert [line["step"] for line in lines[0]] == [line["step"] for line in lines[1]] == STEPS
    for mine, theirs in zip(*lines, strict=True):
        assert mine["tokens"] == theirs["tokens"]
        assert mine["lr_factor"] == theirs["lr_factor"]
        assert mine.keys() == theirs.keys()
        for name in mine.keys() & {"fill-mask/loss", "sentence-order/loss", "grad_norm"}:
            assert mine[name] == pytest.approx(theirs[name], rel=losses), (mine["step"], name)
    tensors = [load_file(folder / "checkpoint" / "model.safetensors") for folder in (one, other)]
    assert tensors[0].keys() == tensors[1].keys()
    for name, tensor in tensors[0].items():
        assert (tensor - tensors[1][name]).abs().max() < weights, name


# The runs differ in the order of sums. After these 8 steps in fp32, which move weights by 2e-2 to
# 3e-1, weights differed by 5e-6 with lamb, 3e-6 with adamw and 1e-5 with muon, and metrics in none
# of their six digits. In bf16 a rounding that falls the other way grew to 2e-2.
LAMB = ("--optimizer", "lamb", "--lr", "1e-2")
ADAMW = ("--optimizer", "adamw", "--lr", "3e-3")
MUON = ("--optimizer", "muon", "--lr", "1e-3")


@pytest.mark.parametrize(
    ("more", "num_processes", "weights"),
    [
        (LAMB, 2, 3e-5),
        pytest.param((*LAMB, "--recompute"), 4, 3e-5, marks=pytest.mark.slow),
        pytest.param((*ADAMW, "--compile"), 2, 3e-5, marks=pytest.mark.slow),
        pytest.param(MUON, 2, 2e-4, marks=pytest.mark.extended),
        ((*LAMB, "--order-share", "0.5", "--order-sentences", "1"), 2, 3e-5),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else str(value),
)
def test_several_processes_train_as_one_does(
    options: list[str], tmp_path: Path, more: tuple[str, ...], num_processes: int, weights: float
) -> None:
    """One process has four passes a step, the others one of all their rows."""
    one, several = tmp_path / "one", tmp_path / "several"
    assert run_in_process(options, one, *more).status == 0
    rows = ("--micro-batch-size", str(8 // num_processes))
    check_ended(run_world(options, several, *more, *rows, num_processes=num_processes))
    check_close(one, several, weights=weights, losses=1e-5)
    assert moved(one) > 1e-2


def test_the_number_of_processes_may_change_amidst_a_run(
    options: list[str], tmp_path: Path
) -> None:
    """One begins, two go on, one ends it. A signal to either of the two ends both."""
    run, whole, more = tmp_path / "run", tmp_path / "whole", LAMB
    assert run_in_process(options, whole, *more).status == 0

    def stop_before(step: int) -> Fate:
        return partial(before_step, step, partial(get_signals, signal.SIGTERM))

    assert run_in_process(options, run, *more, fate=stop_before(2)).status == 128 + signal.SIGTERM
    ended = run_world(options, run, *more, fates={1: stop_before(5)})
    check_ended(ended, 128 + signal.SIGTERM)
    assert checkpoint_state(run)["step"] == 5
    assert "Resuming from step 5.\n" in run_in_process(options, run, *more).out
    check_close(run, whole, weights=3e-5, losses=1e-5)


@pytest.mark.parametrize("dying", [pytest.param(0, marks=pytest.mark.extended), 1])
def test_a_process_that_dies_ends_the_others_and_the_run_goes_on(
    options: list[str], tmp_path: Path, dying: int
) -> None:
    """To the same bits, with as many processes; what was half-written is tidied up by one."""
    run, whole, more = tmp_path / "run", tmp_path / "whole", LAMB
    check_ended(run_world(options, whole, *more))
    ended = run_world(options, run, *more, *OFTEN, fates={dying: partial(before_step, 4, die)})
    assert ended[dying].status == -signal.SIGKILL
    assert (ended[1 - dying].status, ended[1 - dying].err) == (1, LOST)
    for number in range(9):
        (run / "checkpoints" / f".step-{number:08}.0123abcd.partial").mkdir()
    ended = run_world(options, run, *more, *OFTEN)
    check_ended(ended)
    assert "Resuming from step 3.\n" in ended[0].out
    assert same_weights(run, whole)
    assert [line["step"] for line in read_metrics(run)] == STEPS


def stop(job: subprocess.Popen[bytes]) -> None:
    job.send_signal(signal.SIGTERM)


def kill_a_process(job: subprocess.Popen[bytes]) -> None:
    psutil.Process(job.pid).children()[-1].kill()


@pytest.mark.slow
@pytest.mark.parametrize("end", [stop, kill_a_process])
def test_a_job_of_torchrun_that_ends_goes_on(
    options: list[str], tmp_path: Path, end: Callable[[subprocess.Popen[bytes]], None]
) -> None:
    """To the same bits as processes that were begun without it."""
    folder, log = tmp_path / "run", tmp_path / "log"
    long = [*options, *OFTEN, "--steps", "3000"]
    with torchrun(long, folder, log) as job:
        while not (folder / "metrics.jsonl").is_file():
            assert job.poll() is None, log.read_text()
            time.sleep(0.02)
        end(job)
    assert job.returncode != 0
    assert ("Repeat the command to resume.\n" in log.read_text()) == (end is stop)
    step = checkpoint_state(folder)["step"]
    fates = {0: partial(before_step, step + 2, partial(get_signals, signal.SIGTERM))}
    ended = run_world(long, folder, fates=fates)
    check_ended(ended, 128 + signal.SIGTERM)
    assert f"Resuming from step {step}.\n" in ended[0].out
    check_ended(run_world(long, tmp_path / "whole", fates=fates), 128 + signal.SIGTERM)
    assert same_weights(folder, tmp_path / "whole")
