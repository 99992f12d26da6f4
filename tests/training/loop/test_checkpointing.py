"""After any failure while a checkpoint is written, an intact one exists, and the run resumes."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training.processes import (
    SAVE_OFTEN,
    before_step,
    die_before_change,
    limit_file_size,
    run_in_process,
)
from tests.training.support import (
    REPOSITORY,
    WIKI,
    best_step,
    check_same,
    checkpoint_state,
    same_weights,
    saved_steps,
)
from training.errors import RunError
from training.loop.checkpointing import Checkpoints, find_damage, load_state, step_of
from training.loop.progress import read_record

Damage = Callable[[Path], object]


def partial_of(checkpoint: Path) -> Path:
    """Return the temporary folder in which a checkpoint is written."""
    return checkpoint.with_name(f".{checkpoint.name}.0123abcd.partial")


def linked_step(folder: Path) -> int:
    """Return the step of the linked checkpoint, after checking that it is intact."""
    link = folder / "checkpoint"
    assert link.is_symlink()
    assert find_damage(link) is None
    return step_of(link.resolve())


def flip_a_byte(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


Capture = pytest.CaptureFixture[str]
DAMAGES: dict[str, tuple[Damage, str]] = {
    "a byte": (flip_a_byte, "model.safetensors has changed since it was written"),
    "truncated": (lambda path: os.truncate(path / "state.pt", 100), "state.pt has changed since"),
    "no hashes": (lambda path: (path / "hashes.json").unlink(), "No such file or directory"),
    "no state": (lambda path: (path / "hashes.json").write_text("{}"), "does not list state.pt"),
}


def write_model(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"weights")


def save(folder: Path, *steps: int, keep: int = 2) -> Checkpoints:
    checkpoints = Checkpoints(folder=folder, num_kept=keep)
    for step in steps:
        checkpoints.save(step, write_model, {"step": step, "moments": torch.arange(100.0)})
    return checkpoints


def test_the_best_checkpoint_is_kept_at_any_age(tmp_path: Path) -> None:
    checkpoints = save(tmp_path, 0, 5)
    checkpoints.link_best(5)
    save(tmp_path, 99_999_999, 100_000_000, keep=1)
    checkpoints.link_best(None)  # a run without validation
    assert saved_steps(tmp_path) == [5, 100_000_000]
    assert best_step(tmp_path) == 5
    assert linked_step(tmp_path) == 100_000_000
    checkpoints.link_best(100_000_000)
    save(tmp_path, 100_000_001, keep=1)
    assert saved_steps(tmp_path) == [100_000_000, 100_000_001]
    checkpoints.link_best(7)  # a checkpoint that is lost
    assert not (tmp_path / "best").is_symlink()


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_ignored(
    tmp_path: Path, damage: Damage, message: str, capsys: Capture
) -> None:
    checkpoints = save(tmp_path, 1, 2, 3, keep=3)
    damaged = checkpoints.folder_of(3)
    damage(damaged)
    assert checkpoints.newest() == tmp_path / "checkpoints" / "step-00000002"
    warning = capsys.readouterr().err
    assert warning.startswith(f"warning: Ignored the damaged checkpoint {damaged}: ")
    assert message in warning
    assert linked_step(tmp_path) == 2
    checkpoints.save(3, write_model, {"step": 3})  # replaces the damaged checkpoint
    assert linked_step(tmp_path) == 3
    assert saved_steps(tmp_path) == [1, 2, 3]


def test_replacing_a_checkpoint_leaves_an_intact_one_after_a_kill(tmp_path: Path) -> None:
    checkpoints = save(tmp_path, 1, keep=1)
    checkpoint = checkpoints.folder_of(1)
    checkpoints.save(1, write_model, {"step": "ignored"})
    assert load_state(checkpoint)["step"] == 1
    shutil.copytree(checkpoint, partial_of(checkpoint).with_suffix(".old"))
    checkpoints.save(1, write_model, {"step": "replaced"}, replaces=True)
    assert saved_steps(tmp_path) == [1]
    checkpoint.rename(partial_of(checkpoint))  # simulates a kill between the two renames
    assert checkpoints.newest() == checkpoint
    assert load_state(checkpoint)["step"] == "replaced"
    assert saved_steps(tmp_path) == [1]


def full_disk(folder: Path) -> None:
    write_model(folder)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


OPERATIONS = st.sampled_from(["save", "fail", "die", "damage", "damage the oldest", "resume"])


@settings(deadline=None, max_examples=40)
@given(operations=st.lists(OPERATIONS, max_size=12), keep=st.integers(1, 3))
def test_the_newest_intact_checkpoint_is_found_after_any_crash(
    tmp_path_factory: pytest.TempPathFactory, operations: list[str], keep: int
) -> None:
    """`is_intact` records which checkpoints exist, and whether each is intact."""
    folder = tmp_path_factory.mktemp("run")
    checkpoints, is_intact = save(folder, 0, keep=keep), {0: True}
    for operation in [*operations, "resume"]:
        step = max(is_intact) + 1
        if operation == "save":
            save(folder, step, keep=keep)
            is_intact = dict([*is_intact.items(), (step, True)][-keep:])
            assert saved_steps(folder) == list(is_intact)
        elif operation == "fail":
            with pytest.raises(RunError):
                checkpoints.save(step, full_disk, {})
        elif operation == "die":
            partial_of(checkpoints.folder_of(step)).mkdir(exist_ok=True)
        elif operation == "resume" and not any(is_intact.values()):
            with pytest.raises(RunError, match=r"Every checkpoint .* is damaged"):
                checkpoints.newest()
        elif operation == "resume":
            newest = max(step for step in is_intact if is_intact[step])
            assert checkpoints.newest() == checkpoints.folder_of(newest)
            assert linked_step(folder) == newest == checkpoint_state(folder)["step"]
            assert not list(folder.rglob(".step-*"))
            is_intact = {step: intact for step, intact in is_intact.items() if step <= newest}
        else:
            damaged_step = max(is_intact) if operation == "damage" else min(is_intact)
            if is_intact[damaged_step]:
                flip_a_byte(checkpoints.folder_of(damaged_step))
            is_intact[damaged_step] = False


@pytest.mark.parametrize(
    ("first_change", "stride", "min_kills"),
    [(3, 13, 11), pytest.param(1, 1, 131, marks=pytest.mark.slow)],
)
def test_a_run_killed_before_a_change_to_its_folder_resumes_to_the_same_weights(
    tiny_options: list[str], tmp_path: Path, first_change: int, stride: int, min_kills: int
) -> None:
    """The run saves after each of its three steps, and removes the checkpoint before."""
    options = [*tiny_options, "--steps", "3", "--keep", "1", *SAVE_OFTEN]
    uninterrupted_run = tmp_path / "uninterrupted"
    assert run_in_process(options, uninterrupted_run).status == 0
    for number in count(first_change, stride):
        run = tmp_path / str(number)
        hook = partial(die_before_change, number, run)
        if (status := run_in_process(options, run, hook=hook).status) == 0:
            break
        assert status == -signal.SIGKILL
        if (run / "checkpoint").is_symlink():
            linked_step(run)
        ended = run_in_process(options, run)
        assert (ended.status, ended.err) == (0, ""), number
        check_same(run, uninterrupted_run)
        assert saved_steps(run) == [3]
        assert not list(run.rglob(".step-*"))
        shutil.rmtree(run)
    assert (number - first_change) // stride >= min_kills


def test_a_full_disk_ends_the_run_with_an_intact_checkpoint(
    tiny_run: Path, tiny_options: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    hook = partial(before_step, 5, partial(limit_file_size, 30_000))
    ended = run_in_process(tiny_options, folder, *SAVE_OFTEN, hook=hook)
    assert ended.status == 1
    assert ended.err.startswith("error: The checkpoint of step 5 could not be written: ")
    assert ended.err.endswith(f" last checkpoint, {folder}/checkpoints/step-00000004, is intact.\n")
    assert saved_steps(folder) == [3, 4]
    assert run_in_process(tiny_options, folder).status == 0
    assert same_weights(folder, tiny_run)


# The following commands run as in a shell: with all threads of the machine, and compiled unless
# they disable it. They are killed at random times.
_TIMEOUT_S = 900.0


def start(command: Sequence[str], folder: Path) -> subprocess.Popen[str]:
    """Start a training command that saves about once per step."""
    arguments = [sys.executable, "-m", *command, "--output", str(folder), "--save-every", "0.05s"]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return subprocess.Popen(
        arguments, cwd=REPOSITORY, env=environment, text=True, stderr=subprocess.PIPE
    )


def finish(command: Sequence[str], folder: Path) -> None:
    with start(command, folder) as process:
        _, errors = process.communicate(timeout=_TIMEOUT_S)
    assert process.returncode == 0, errors


def kill_during(command: Sequence[str], folder: Path) -> None:
    """Kill a command at a random time after its next checkpoint, unless it ends before."""
    checkpoint = newest(folder)
    deadline = time.monotonic() + _TIMEOUT_S
    with start(command, folder) as process:
        while newest(folder) == checkpoint and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(random.random())
        process.kill()


def newest(folder: Path) -> Path | None:
    link = folder / "checkpoint"
    return link.readlink() if link.is_symlink() else None


@pytest.fixture
def commands(vocab_dir: Path, finetune_options: list[str]) -> dict[str, list[str]]:
    """Commands of 16 to 20 steps with dropout, and with enough tokens for all threads."""
    pretraining = [
        *("training.commands.pretrain", "--corpus", str(WIKI), "--tokenizer", str(vocab_dir)),
        *("--embedding-size", "64", "--hidden-size", "64", "--layers", "3", "--heads", "2"),
        *("--max-positions", "64", "--length", "64", "--batch-size", "64", "--steps", "16"),
        *("--dropout", "v1", "--lr", "1e-2", "--adamw-lr", "1e-2"),
    ]
    sizes = ["--batch-size", "64", "32", "32", "--steps", "20"]
    return {
        "muon": pretraining,
        "lamb": [*pretraining, "--optimizer", "lamb"],
        "not compiled": [*pretraining, "--no-compile", "--optimizer", "adamw"],
        "finetuning": ["training.commands.finetune", *finetune_options, *sizes],
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["muon", "lamb", "not compiled", "finetuning"])
def test_a_command_killed_at_random_times_resumes_to_the_same_weights(
    commands: dict[str, list[str]], name: str, tmp_path: Path
) -> None:
    uninterrupted, killed = tmp_path / "uninterrupted", tmp_path / "killed"
    finish(commands[name], uninterrupted)
    # If both precisions are about equally fast, measuring again could select the other one.
    precision = read_record(uninterrupted)["precision"]
    command = [*commands[name], "--precision", precision]
    for _ in range(2):
        kill_during(command, killed)
    finish(command, killed)
    assert same_weights(killed, uninterrupted)
