"""Whatever happens while a checkpoint is written, there is a whole one, and the run goes on."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
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
    sleep,
    start,
    write_no_file_over,
)
from tests.training.support import read_metrics, same_weights
from training.errors import RunError
from training.loop.checkpointing import Checkpoints, find_damage, load_state, step_of

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
    "a list": (lambda path: (path / "hashes.json").write_text("[1]"), "list"),
    "no hash": (lambda path: (path / "hashes.json").write_text("{}"), "does not list state.pt"),
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


def test_a_run_is_trained_by_one_command_at_a_time(
    tiny: Path, tiny_options: list[str], tmp_path: Path
) -> None:
    """Also by one whose helpers outlive it for a moment."""
    folder = tmp_path / "run"
    first = start([*tiny_options, "--workers", "1"], folder, fate=partial(before_step, 3, sleep))
    first.wait_for(folder / "metrics.jsonl")
    partial_of(folder / "checkpoints" / "step-00000001").mkdir()  # what the first is writing
    second = run_in_process(tiny_options, folder)
    assert second.status == 1
    assert second.err == (
        f"error: Another process is training the run in {folder}. "
        "End it, or wait until it has ended.\n"
    )
    assert partial_of(folder / "checkpoints" / "step-00000001").is_dir()
    first.send(signal.SIGKILL)
    assert first.wait().status == -signal.SIGKILL
    assert run_in_process(tiny_options, folder).status == 0
    assert same_weights(folder, tiny)


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
    assert re.fullmatch(
        "error: The checkpoint of step 5 could not be written: "
        rf"{folder}/checkpoints/\.step-00000005\.\w+\.partial/model.safetensors cannot be written: "
        r"Error while serializing: I/O error: File too large \(os error 27\)\. "
        "Fix the problem, and repeat the command. "
        f"The last checkpoint, {folder}/checkpoints/step-00000004, is intact.\n",
        ended.err,
    )
    assert names(folder) == ["step-00000003", "step-00000004"]
    assert run_in_process(tiny_options, folder).status == 0
    assert same_weights(folder, tiny)
