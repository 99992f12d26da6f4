"""Whatever happens while a checkpoint is written, there is a whole one, and the run goes on."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training.processes import (
    before_step,
    die_before_change,
    run_in_process,
    write_no_file_over,
)
from tests.training.support import REPOSITORY, WIKI, read_metrics, same_weights
from training.errors import RunError
from training.loop.checkpointing import Checkpoints, find_damage, load_state, step_of
from training.loop.progress import read_record

Damage = Callable[[Path], object]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("step-*"))


def partial_of(checkpoint: Path) -> Path:
    """The folder of a checkpoint that is being written."""
    return checkpoint.with_name(f".{checkpoint.name}.0123abcd.partial")


def linked_step(folder: Path) -> int:
    """The step of the checkpoint that the link is to, which is whole."""
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
}


def write_model(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"weights")


def save(folder: Path, *steps: int, keep: int = 2) -> Checkpoints:
    checkpoints = Checkpoints(folder=folder, num_kept=keep)
    for step in steps:
        checkpoints.save(step, write_model, {"step": step, "moments": torch.arange(100.0)})
    return checkpoints


def test_the_best_stays_however_old_it_is(tmp_path: Path) -> None:
    checkpoints = save(tmp_path, 0, 5)
    checkpoints.link_best(5)
    save(tmp_path, 99_999_999, 100_000_000, keep=1)
    checkpoints.link_best(None)  # a run without validation
    assert names(tmp_path) == ["step-00000005", "step-100000000"]
    assert step_of((tmp_path / "best").resolve()) == 5
    assert linked_step(tmp_path) == 100_000_000
    checkpoints.link_best(100_000_000)
    save(tmp_path, 100_000_001, keep=1)
    assert names(tmp_path) == ["step-100000000", "step-100000001"]
    checkpoints.link_best(7)  # one that is lost
    assert not (tmp_path / "best").is_symlink()


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_ignored(
    tmp_path: Path, damage: Damage, message: str, capsys: Capture
) -> None:
    checkpoints = save(tmp_path, 1, 2, 3, keep=3)
    damage(tmp_path / "checkpoints" / "step-00000003")
    assert checkpoints.newest() == tmp_path / "checkpoints" / "step-00000002"
    warning = capsys.readouterr().err
    assert warning.startswith(
        f"warning: Ignored the damaged checkpoint {tmp_path}/checkpoints/step-00000003: "
    )
    assert message in warning
    assert linked_step(tmp_path) == 2
    checkpoints.save(3, write_model, {"step": 3})  # the same step is written anew
    assert linked_step(tmp_path) == 3
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]


def test_a_step_that_is_saved_anew_is_whole_whenever_it_is_killed(tmp_path: Path) -> None:
    checkpoints = save(tmp_path, 1, keep=1)
    checkpoints.save(1, write_model, {"step": "other"})
    assert load_state(checkpoints.folder_of(1))["step"] == 1
    newer = partial_of(checkpoints.folder_of(1))
    shutil.copytree(checkpoints.folder_of(1), newer.with_suffix(".old"))
    checkpoints.save(1, write_model, {"step": "anew"}, replaces=True)
    assert names(tmp_path) == ["step-00000001"]
    checkpoints.folder_of(1).rename(newer)  # as a kill between the two renames leaves it
    assert checkpoints.newest() == checkpoints.folder_of(1)
    assert load_state(checkpoints.folder_of(1))["step"] == "anew"
    assert names(tmp_path) == ["step-00000001"]


def full_disk(folder: Path) -> None:
    write_model(folder)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


OPERATIONS = st.sampled_from(["save", "fail", "die", "damage", "damage the oldest", "go on"])


@settings(deadline=None, max_examples=40)
@given(operations=st.lists(OPERATIONS, max_size=12), keep=st.integers(1, 3))
def test_the_newest_intact_checkpoint_is_found_after_any_crash(
    tmp_path_factory: pytest.TempPathFactory, operations: list[str], keep: int
) -> None:
    """The test keeps its own record of what is there, and whether it is as it was written."""
    folder = tmp_path_factory.mktemp("run")
    checkpoints, is_whole = save(folder, 0, keep=keep), {0: True}
    for operation in [*operations, "go on"]:
        step = max(is_whole) + 1
        if operation == "save":
            save(folder, step, keep=keep)
            is_whole = dict([*is_whole.items(), (step, True)][-keep:])
            assert names(folder) == [checkpoints.folder_of(each).name for each in is_whole]
        elif operation == "fail":
            with pytest.raises(RunError):
                checkpoints.save(step, full_disk, {})
        elif operation == "die":
            partial_of(checkpoints.folder_of(step)).mkdir(exist_ok=True)
        elif operation == "go on" and not any(is_whole.values()):
            with pytest.raises(RunError, match=r"Every checkpoint .* is damaged"):
                checkpoints.newest()
        elif operation == "go on":
            newest = max(each for each in is_whole if is_whole[each])
            assert checkpoints.newest() == checkpoints.folder_of(newest)
            assert (
                linked_step(folder) == newest == load_state(checkpoints.folder_of(newest))["step"]
            )
            assert not list(folder.rglob(".step-*"))
            is_whole = {each: whole for each, whole in is_whole.items() if each <= newest}
        else:
            victim = max(is_whole) if operation == "damage" else min(is_whole)
            if is_whole[victim]:
                flip_a_byte(checkpoints.folder_of(victim))
            is_whole[victim] = False


OFTEN = ("--save-every", "0.0001s")


def killed_at(options: list[str], folder: Path, numbers: Iterator[int], tiny: Path) -> int:
    """Kill the run before each of these changes to its folder, go on, compare; how many died."""
    for killed, number in enumerate(numbers):
        run = folder / str(number)
        fate = partial(die_before_change, number, run)
        status = run_in_process(options, run, fate=fate).status
        if status == 0:
            return killed
        assert status == -signal.SIGKILL
        if (run / "checkpoint").is_symlink():
            linked_step(run)
        ended = run_in_process(options, run)
        assert (ended.status, ended.err) == (0, ""), number
        assert same_weights(run, tiny), number
        assert [line["step"] for line in read_metrics(run)] == [1, 2, 3]
        assert len(names(run)) == 1
        assert not list(run.rglob(".step-*"))
        shutil.rmtree(run)
    raise AssertionError("the numbers ended before the run did")


@pytest.fixture(scope="module")
def shortest(tiny_options: list[str]) -> list[str]:
    """A run that saves after each of its three steps, and removes the one before."""
    return [*tiny_options, "--steps", "3", "--keep", "1", *OFTEN]


@pytest.fixture(scope="module")
def shortest_run(shortest: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shortest") / "run"
    assert run_in_process(shortest, folder).status == 0
    return folder


def test_a_run_killed_while_it_writes_goes_on_to_the_same_weights(
    shortest: list[str], shortest_run: Path, tmp_path: Path
) -> None:
    assert killed_at(shortest, tmp_path, count(3, 13), shortest_run) > 10


@pytest.mark.slow
def test_a_run_killed_before_any_change_to_its_folder_goes_on_to_the_same_weights(
    shortest: list[str], shortest_run: Path, tmp_path: Path
) -> None:
    assert killed_at(shortest, tmp_path, count(1), shortest_run) > 130


def test_a_disk_that_is_full_stops_the_run(
    tiny: Path, tiny_options: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    fate = partial(before_step, 5, partial(write_no_file_over, 30_000))
    ended = run_in_process(tiny_options, folder, *OFTEN, fate=fate)
    assert ended.status == 1
    assert ended.err.startswith("error: The checkpoint of step 5 could not be written: ")
    assert ended.err.endswith(
        f"The last checkpoint, {folder}/checkpoints/step-00000004, is intact.\n"
    )
    assert names(folder) == ["step-00000003", "step-00000004"]
    assert run_in_process(tiny_options, folder).status == 0
    assert same_weights(folder, tiny)


# Commands as they are given in a shell: with as many threads as the machine has, compiled unless
# they say otherwise. Where they are when they are killed is left to chance.
_TIMEOUT_S = 900.0


def begin(command: Sequence[str], folder: Path) -> subprocess.Popen[str]:
    """Begin a command of training that saves after each step, or about so."""
    words = [sys.executable, "-m", *command, "--output", str(folder), "--save-every", "0.05s"]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return subprocess.Popen(
        words, cwd=REPOSITORY, env=environment, text=True, stderr=subprocess.PIPE
    )


def finish(command: Sequence[str], folder: Path) -> None:
    with begin(command, folder) as process:
        _, errors = process.communicate(timeout=_TIMEOUT_S)
    assert process.returncode == 0, errors


def kill_amidst(command: Sequence[str], folder: Path) -> None:
    """Kill a command at a random time after its first checkpoint; it may also end before."""
    before = newest(folder)
    until = time.monotonic() + _TIMEOUT_S
    with begin(command, folder) as process:
        while newest(folder) == before and process.poll() is None:
            assert time.monotonic() < until
            time.sleep(0.01)
        time.sleep(random.random())
        process.kill()


def newest(folder: Path) -> Path | None:
    """The newest checkpoint, if there is one."""
    link = folder / "checkpoint"
    return link.readlink() if link.is_symlink() else None


def check(command: Sequence[str], folder: Path, *, num_deaths: int) -> None:
    """Run a command without interruption, then in another folder with deaths."""
    finish(command, folder / "whole")
    # A machine whose products take as long in either precision may measure otherwise.
    command = [*command, "--precision", read_record(folder / "whole")["precision"]]
    for _ in range(num_deaths):
        kill_amidst(command, folder / "killed")
    finish(command, folder / "killed")
    assert same_weights(folder / "killed", folder / "whole")


@pytest.fixture
def commands(vocab_dir: Path, finetune_options: list[str]) -> dict[str, list[str]]:
    """Runs of 16 to 20 steps with enough tokens for all threads, and with dropout."""
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
def test_a_command_killed_at_random_ends_with_the_weights_of_one_that_was_not(
    commands: dict[str, list[str]], name: str, tmp_path: Path
) -> None:
    check(commands[name], tmp_path, num_deaths=2)
