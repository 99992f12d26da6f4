"""Several processes train as a single process does, and none continues without the others."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.training.processes import (
    LOST_PROCESS_ERROR,
    SAVE_OFTEN,
    Hook,
    before_step,
    check_close,
    check_ended,
    kill_self,
    raise_signals,
    run_in_process,
    run_processes,
    torchrun,
)
from tests.training.support import (
    SQUAD,
    WIKI,
    best_step,
    check_same,
    checkpoint_state,
    largest_weight_change,
    same_weights,
)


@pytest.fixture(scope="module")
def options(tiny_options: list[str]) -> list[str]:
    """Options of the tiny run with four passes per step, which two processes share.

    The precision is fp32, because rounding in bf16 hides faults. There is no dropout, because its
    masks depend on the process and the micro-batch.
    """
    options = [*tiny_options, "--micro-batch-size", "2", "--precision", "fp32"]
    return [*options, "--dropout", "v2"]


# The runs add in different orders. After these 8 steps in fp32, which change weights by 2e-2 to
# 3e-1, weights differed by 5e-6 with lamb, 3e-6 with adamw and 1e-5 with muon. The six digits of
# the metrics did not differ. In bf16, a different rounding grew to 2e-2.
LAMB = ("--optimizer", "lamb", "--lr", "1e-2")
ADAMW = ("--optimizer", "adamw", "--lr", "3e-3")
MUON = ("--optimizer", "muon", "--lr", "1e-3")


@pytest.mark.parametrize(
    ("extra_options", "num_processes", "weights"),
    [
        (LAMB, 2, 3e-5),
        pytest.param((*LAMB, "--recompute"), 4, 3e-5, marks=pytest.mark.slow),
        pytest.param((*ADAMW, "--compile"), 2, 3e-5, marks=pytest.mark.slow),
        pytest.param(MUON, 2, 2e-4, marks=pytest.mark.extended),
        ((*LAMB, "--order-share", "0.5", "--order-sentences", "1"), 2, 3e-5),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else str(value),
)
def test_several_processes_train_as_a_single_process(
    options: list[str],
    tmp_path: Path,
    extra_options: tuple[str, ...],
    num_processes: int,
    weights: float,
) -> None:
    """The single process has four passes per step, the others one pass each."""
    single_process, run = tmp_path / "single", tmp_path / "run"
    options = [*options, *extra_options]
    assert run_in_process(options, single_process).status == 0
    options += ["--micro-batch-size", str(8 // num_processes)]
    check_ended(run_processes(options, run, num_processes=num_processes))
    check_close(single_process, run, weights=weights)
    assert largest_weight_change(single_process) > 1e-2


FINETUNE = "training.commands.finetune"
# Softmax cancels these biases, so their gradients contain only rounding errors.
WITHOUT_GRADIENT = (
    "albert.encoder.albert_layer_groups.0.albert_layers.0.attention.key.bias",
    "qa_outputs.bias",
)
# After 6 steps in fp32, which change weights by 1e-2 and more, weights differ by 2e-7 to 1e-6.
check_same_run = partial(check_close, weights=1e-5, metrics=1e-4, ignored_weights=WITHOUT_GRADIENT)


@pytest.fixture
def finetuning(short_finetune_options: list[str]) -> list[str]:
    """The options of a finetuning run of six steps without dropout, except its data."""
    rates = ("--optimizer", "adamw", "--lr", "3e-3", "--dropout", "0", "--classifier-dropout", "0")
    return [*short_finetune_options, *rates, "--report-every", "1", "--keep", "20"]


def test_two_processes_train_several_tasks_as_one(finetuning: list[str], tmp_path: Path) -> None:
    """The tasks are multi-label classification, regression, questions and pretraining.

    If the task allows it, the batches do not divide evenly.
    """
    moods, scores = tmp_path / "moods.jsonl", tmp_path / "scores.csv"
    rows = [("a good game", ["glad"]), ("the war was lost", ["sad"]), ("a city", [])] * 5
    moods.write_text("\n".join(json.dumps({"text": t, "label": names}) for t, names in rows))
    scores.write_text("text,label\n" + "a good game,1\nthe war was lost,-1.5\n" * 6)
    options = [
        *(*finetuning, "--text-classification", str(moods)),
        *("--problem-type", "multi_label_classification"),
        *("--question-answering", str(SQUAD), "--pretraining", str(WIKI)),
        *("--head", "score", "--text-classification", str(scores), "--problem-type", "regression"),
        *("--batch-size", "7", "5", "3", "4", "--steps", "12"),
    ]
    assert run_in_process(options, tmp_path / "one", program=FINETUNE).status == 0
    check_ended(run_processes(options, tmp_path / "two", program=FINETUNE))
    check_same_run(tmp_path / "one", tmp_path / "two")
    assert largest_weight_change(tmp_path / "one") > 5e-3


def test_two_processes_validate_and_select_as_one_process(
    finetuning: list[str], labelled_texts: Path, tmp_path: Path
) -> None:
    """The micro-batches differ. The metric depends on all texts, and selects during the run too."""
    one, two = tmp_path / "one", tmp_path / "two"
    data = ["--text-classification", str(labelled_texts), "--validation", str(labelled_texts)]
    options = [*finetuning, *data, "--batch-size", "13"]
    options += ["--validate-every", "4", "--metric", "macro_f1"]
    assert run_in_process(options, one, program=FINETUNE).status == 0
    processes = run_processes(options, two, "--micro-batch-size", "4", program=FINETUNE)
    check_ended(processes)
    assert "validation of text-classification: loss" in processes[0].out + processes[0].err
    check_same_run(one, two)
    assert best_step(one) == best_step(two)
    selections = [checkpoint_state(folder)["selection"] for folder in (one, two)]
    assert selections[0] == pytest.approx(selections[1])


def stop_before(step: int) -> Hook:
    return partial(before_step, step, partial(raise_signals, signal.SIGTERM))


def test_the_number_of_processes_may_change_in_a_run(options: list[str], tmp_path: Path) -> None:
    """One process starts the run, two continue it, one ends it.

    A signal to either of the two ends both.
    """
    run, uninterrupted_run = tmp_path / "run", tmp_path / "uninterrupted"
    options = [*options, *LAMB]
    assert run_in_process(options, uninterrupted_run).status == 0
    assert run_in_process(options, run, hook=stop_before(2)).status == 128 + signal.SIGTERM
    check_ended(run_processes(options, run, hooks={1: stop_before(5)}), 128 + signal.SIGTERM)
    assert checkpoint_state(run)["step"] == 5
    assert "Resuming from step 5.\n" in run_in_process(options, run).out
    check_close(run, uninterrupted_run, weights=3e-5)


@pytest.mark.parametrize("killed", [pytest.param(0, marks=pytest.mark.extended), 1])
def test_a_killed_process_ends_the_others_and_the_run_resumes_to_the_same_weights(
    options: list[str], tmp_path: Path, killed: int
) -> None:
    """One of the processes that resume the run removes partial checkpoints."""
    run, uninterrupted_run = tmp_path / "run", tmp_path / "uninterrupted"
    options = [*options, *LAMB]
    check_ended(run_processes(options, uninterrupted_run))
    hooks = {killed: partial(before_step, 4, kill_self)}
    ended = run_processes(options, run, *SAVE_OFTEN, hooks=hooks)
    assert ended[killed].status == -signal.SIGKILL
    assert (ended[1 - killed].status, ended[1 - killed].err) == (1, LOST_PROCESS_ERROR)
    for number in range(9):
        (run / "checkpoints" / f".step-{number:08}.0123abcd.partial").mkdir()
    ended = run_processes(options, run, *SAVE_OFTEN)
    check_ended(ended)
    assert "Resuming from step 3.\n" in ended[0].out
    check_same(run, uninterrupted_run)


def stop(job: subprocess.Popen[bytes]) -> None:
    job.send_signal(signal.SIGTERM)


def kill_a_process(job: subprocess.Popen[bytes]) -> None:
    psutil.Process(job.pid).children()[-1].kill()


@pytest.mark.slow
@pytest.mark.parametrize("end", [stop, kill_a_process])
def test_an_interrupted_job_of_torchrun_resumes_to_the_same_weights(
    options: list[str], tmp_path: Path, end: Callable[[subprocess.Popen[bytes]], None]
) -> None:
    """Processes that were started without torchrun resume it, and also train the run to compare."""
    folder, log = tmp_path / "run", tmp_path / "log"
    options = [*options, *SAVE_OFTEN, "--steps", "3000"]
    with torchrun(options, folder, log) as job:
        while not (folder / "metrics.jsonl").is_file():
            assert job.poll() is None, log.read_text()
            time.sleep(0.02)
        end(job)
    assert job.returncode != 0
    assert ("Repeat the command to resume.\n" in log.read_text()) == (end is stop)
    step = checkpoint_state(folder)["step"]
    hooks = {0: stop_before(step + 2)}
    ended = run_processes(options, folder, hooks=hooks)
    check_ended(ended, 128 + signal.SIGTERM)
    assert f"Resuming from step {step}.\n" in ended[0].out
    ended = run_processes(options, tmp_path / "uninterrupted", hooks=hooks)
    check_ended(ended, 128 + signal.SIGTERM)
    assert same_weights(folder, tmp_path / "uninterrupted")
