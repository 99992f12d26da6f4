"""Whatever happens while a checkpoint is written, there is a whole one, and the run goes on."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training.loop.damages import DAMAGES, Damage, flip_a_byte, linked_step, names
from training.errors import RunError
from training.loop.checkpointing import Checkpoints, load_state, step_of

Capture = pytest.CaptureFixture[str]


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
    save(tmp_path, 10, 15, keep=1)
    assert names(tmp_path) == ["step-00000005", "step-00000015"]
    assert step_of((tmp_path / "best").resolve()) == 5
    assert linked_step(tmp_path) == 15
    checkpoints.link_best(15)
    save(tmp_path, 20, keep=1)
    assert names(tmp_path) == ["step-00000015", "step-00000020"]


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_passed_over(
    tmp_path: Path, damage: Damage, message: str, capsys: Capture
) -> None:
    checkpoints = save(tmp_path, 1, 2, 3, keep=3)
    damage(tmp_path / "checkpoints" / "step-00000003")
    assert checkpoints.newest() == tmp_path / "checkpoints" / "step-00000002"
    warning = capsys.readouterr().err
    assert warning.startswith(f"warning: passed over {tmp_path}/checkpoints/step-00000003: ")
    assert message in warning
    assert linked_step(tmp_path) == 2
    checkpoints.save(3, write_model, {"step": 3})  # the same step is written anew
    assert linked_step(tmp_path) == 3
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]


def test_a_step_that_is_saved_anew_is_whole_whenever_it_is_killed(tmp_path: Path) -> None:
    checkpoints = save(tmp_path, 1, keep=1)
    checkpoints.save(1, write_model, {"step": "other"})
    assert load_state(checkpoints.at(1))["step"] == 1
    checkpoints.save(1, write_model, {"step": "anew"}, anew=True)
    assert names(tmp_path) == ["step-00000001"]
    # As a kill between the two renames leaves it.
    newer = checkpoints.at(1).rename(tmp_path / "checkpoints" / "step-00000001.partial")
    shutil.copytree(newer, newer.with_name("step-00000001.partial.partial"))
    assert checkpoints.newest() == checkpoints.at(1)
    assert load_state(checkpoints.at(1))["step"] == "anew"
    assert names(tmp_path) == ["step-00000001"]


def full_disk(folder: Path) -> None:
    write_model(folder)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


def torn_file(folder: Path) -> None:
    raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 1 vs 0\nframes")


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (full_disk, "No space left on device"),
        (torn_file, "[enforce fail at inline_container.cc:672] . unexpected pos 1 vs 0"),
    ],
)
def test_a_failed_write_leaves_the_last_checkpoint(
    tmp_path: Path, write: Callable[[Path], None], message: str
) -> None:
    checkpoints = Checkpoints(folder=tmp_path)
    for last in ("there is none before it", f"the last one, {tmp_path}/checkpoints/step-00000001"):
        with pytest.raises(RunError) as caught:
            checkpoints.save(1_234, write, {})
        start = f"the checkpoint of step 1,234 could not be written: {message}; {last}"
        assert str(caught.value).startswith(start)
        assert "\n" not in str(caught.value)
        assert "step-00001234" not in " ".join(names(tmp_path))
        save(tmp_path, 1)
    assert linked_step(tmp_path) == 1


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
            assert names(folder) == [checkpoints.at(each).name for each in is_whole]
        elif operation == "fail":
            with pytest.raises(RunError):
                checkpoints.save(step, full_disk, {})
        elif operation == "die":
            checkpoints.at(step).with_suffix(".partial").mkdir(exist_ok=True)
        elif operation == "go on" and not any(is_whole.values()):
            with pytest.raises(RunError, match="is whole; give another --output"):
                checkpoints.newest()
        elif operation == "go on":
            newest = max(each for each in is_whole if is_whole[each])
            assert checkpoints.newest() == checkpoints.at(newest)
            assert linked_step(folder) == newest == load_state(checkpoints.at(newest))["step"]
            assert not list(folder.rglob("*.partial"))
            is_whole = {each: whole for each, whole in is_whole.items() if each <= newest}
        else:
            victim = max(is_whole) if operation == "damage" else min(is_whole)
            if is_whole[victim]:
                flip_a_byte(checkpoints.at(victim))
            is_whole[victim] = False
