"""Whatever happens while a checkpoint is written, there is a whole one, and the run goes on."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.programs import needs_program
from tests.training.processes import (
    before_step,
    die_before_change,
    fill_disk,
    get_signals,
    run_in_process,
    sleep,
    start,
    write_no_file_over,
)
from tests.training.support import checkpoint_state, read_metrics, same_weights
from training.loop.checkpointing import Checkpoints, claim, find_damage, load_state, step_of
from training.loop.progress import RunError

Capture = pytest.CaptureFixture[str]
Damage = Callable[[Path], object]

STEPS = list(range(1, 9))
OFTEN = ("--save-every", "0.0001s")


def write_model(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"weights")


def save(folder: Path, *steps: int, keep: int = 2) -> Checkpoints:
    checkpoints = Checkpoints(folder=folder, num_kept=keep)
    for step in steps:
        checkpoints.save(step, write_model, {"step": step, "moments": torch.arange(100.0)})
    return checkpoints


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def linked_step(folder: Path) -> int:
    """The step of the checkpoint that the link is to, which is whole."""
    link = folder / "checkpoint"
    assert link.is_symlink()
    assert find_damage(link) is None
    return step_of(link.resolve())


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_stay(tmp_path: Path, keep: int) -> None:
    checkpoints = save(tmp_path, 0, 5, 10, 100_000_000, keep=keep)
    kept = ["step-100000000", "step-00000010", "step-00000005"][:keep]
    assert names(tmp_path) == sorted(kept)
    newest = checkpoints.newest()
    assert newest == tmp_path / "checkpoints" / "step-100000000"
    assert linked_step(tmp_path) == 100_000_000
    assert load_state(newest)["moments"].equal(torch.arange(100.0))


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


@pytest.mark.parametrize("step", [None, 7])
def test_a_best_that_is_lost_has_no_link(tmp_path: Path, step: int | None) -> None:
    checkpoints = save(tmp_path, 5)
    checkpoints.link_best(5)
    checkpoints.link_best(step)
    assert not (tmp_path / "best").is_symlink()


def test_a_copy_that_followed_the_link_to_the_best(tmp_path: Path) -> None:
    checkpoints = save(tmp_path / "run", 0, 5)
    checkpoints.link_best(0)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    copy = Checkpoints(folder=tmp_path / "copy")
    assert copy.newest() == tmp_path / "copy" / "checkpoints" / "step-00000005"
    copy.link_best(0)
    assert step_of((tmp_path / "copy" / "best").resolve()) == 0
    assert names(tmp_path / "copy") == ["step-00000000", "step-00000005"]


def test_a_step_is_saved_once(tmp_path: Path) -> None:
    checkpoints = save(tmp_path, 3)
    before = (tmp_path / "checkpoint" / "state.pt").stat()
    checkpoints.save(3, write_model, {"step": 4})
    assert (tmp_path / "checkpoint" / "state.pt").stat() == before


def flip_a_byte(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def put(name: str, content: str) -> Damage:
    return lambda checkpoint: (checkpoint / name).write_text(content)


def take(name: str) -> Damage:
    return lambda checkpoint: (checkpoint / name).unlink()


DAMAGES: dict[str, tuple[Damage, str]] = {
    "a byte": (flip_a_byte, "model.safetensors has changed since it was written"),
    "truncated": (lambda path: os.truncate(path / "state.pt", 100), "state.pt has changed since"),
    "no state": (take("state.pt"), "No such file or directory"),
    "no hashes": (take("hashes.json"), "No such file or directory"),
    "half the hashes": (put("hashes.json", '{"state.pt": "12'), "Unterminated string"),
    "hashes of nothing": (put("hashes.json", "{}"), "hashes.json does not name state.pt"),
    "other hashes": (put("hashes.json", "[]"), "has no attribute 'items'"),
}


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


def test_the_last_whole_checkpoint_outlives_damaged_newer_ones(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, keep=3)
    for step in (2, 3):
        flip_a_byte(tmp_path / "checkpoints" / f"step-0000000{step}")
    checkpoints = Checkpoints(folder=tmp_path, num_kept=1)
    assert checkpoints.newest() == tmp_path / "checkpoints" / "step-00000001"
    with pytest.raises(RunError):
        checkpoints.save(4, full_disk, {})
    assert checkpoints.newest() == tmp_path / "checkpoints" / "step-00000001"


def test_nothing_whole_is_an_error_and_nothing_is_removed(tmp_path: Path) -> None:
    checkpoints = save(tmp_path, 1, 2)
    before = names(tmp_path)
    for name in before:
        flip_a_byte(tmp_path / "checkpoints" / name)
    with pytest.raises(RunError, match=r"no checkpoint in .*/checkpoints is whole; give another"):
        checkpoints.newest()
    assert names(tmp_path) == before


def test_partial_checkpoints_are_removed(tmp_path: Path) -> None:
    checkpoints = save(tmp_path, 1)
    for name in ("step-00000002.partial", "step-00000000.partial"):
        (tmp_path / "checkpoints" / name).mkdir()
        write_model(tmp_path / "checkpoints" / name)
    (tmp_path / "checkpoint.partial").symlink_to("nowhere")
    assert checkpoints.newest() == tmp_path / "checkpoints" / "step-00000001"
    assert names(tmp_path) == ["step-00000001"]
    assert not (tmp_path / "checkpoint.partial").is_symlink()


def test_a_lost_link_comes_back(tmp_path: Path) -> None:
    checkpoints = save(tmp_path, 1, 2)
    (tmp_path / "checkpoint").unlink()
    assert checkpoints.newest() is not None
    assert linked_step(tmp_path) == 2


def test_a_copy_that_followed_the_link(tmp_path: Path) -> None:
    save(tmp_path / "run", 1, 2)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert not (tmp_path / "copy" / "checkpoint").is_symlink()
    checkpoints = Checkpoints(folder=tmp_path / "copy")
    assert checkpoints.newest() == tmp_path / "copy" / "checkpoints" / "step-00000002"
    assert linked_step(tmp_path / "copy") == 2
    assert names(tmp_path / "copy") == ["step-00000001", "step-00000002"]


def test_a_copy_of_the_newest_checkpoint_alone(tmp_path: Path) -> None:
    save(tmp_path / "run", 1, 2)
    shutil.copytree(tmp_path / "run" / "checkpoint", tmp_path / "copy" / "checkpoint")
    checkpoints = Checkpoints(folder=tmp_path / "copy")
    assert checkpoints.newest() == tmp_path / "copy" / "checkpoints" / "step-00000002"
    assert linked_step(tmp_path / "copy") == 2


def test_a_damaged_copy(tmp_path: Path) -> None:
    save(tmp_path / "run", 1, 2)
    shutil.copytree(tmp_path / "run" / "checkpoint", tmp_path / "alone" / "checkpoint")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    for name in ("alone", "copy"):
        flip_a_byte(tmp_path / name / "checkpoint")
    with pytest.raises(RunError, match=r"alone/checkpoint is not whole: model.safetensors has ch"):
        Checkpoints(folder=tmp_path / "alone").newest()
    assert (tmp_path / "alone" / "checkpoint" / "state.pt").is_file()
    assert Checkpoints(folder=tmp_path / "copy").newest() is not None
    assert linked_step(tmp_path / "copy") == 2


def test_a_checkpoint_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    write_model(tmp_path / "checkpoint")
    with pytest.raises(RunError, match=r"by an earlier version; give another --output, and --init"):
        Checkpoints(folder=tmp_path)
    assert (tmp_path / "checkpoint" / "model.safetensors").is_file()


def full_disk(folder: Path) -> None:
    write_model(folder)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


def torn_file(folder: Path) -> None:
    raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 1 vs 0\nframes")


def unserializable(folder: Path) -> None:
    raise safetensors.SafetensorError("I/O error: File too large (os error 27)")


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (full_disk, "No space left on device"),
        (torn_file, "[enforce fail at inline_container.cc:672] . unexpected pos 1 vs 0"),
        (unserializable, "I/O error: File too large (os error 27)"),
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
            assert linked_step(folder) == newest
            is_whole = {each: whole for each, whole in is_whole.items() if each <= newest}
        else:
            victim = max(is_whole) if operation == "damage" else min(is_whole)
            if is_whole[victim]:
                flip_a_byte(checkpoints.at(victim))
            is_whole[victim] = False


def test_a_claim_is_released(tmp_path: Path) -> None:
    claim(tmp_path / "new").release()
    claim(tmp_path / "new").release()


def test_a_run_is_trained_by_one_command_at_a_time(
    tiny: Path, tiny_options: list[str], tmp_path: Path
) -> None:
    """Also by one whose helpers outlive it for a moment."""
    folder = tmp_path / "run"
    first = start([*tiny_options, "--workers", "1"], folder, fate=partial(before_step, 3, sleep))
    first.wait_for(folder / "metrics.jsonl")
    (folder / "checkpoints" / "step-00000001.partial").mkdir()  # what the first is writing
    second = run_in_process(tiny_options, folder)
    assert second.status == 1
    assert second.err == (
        f"error: another process trains the run in {folder}; end it first, or wait for its end\n"
    )
    assert (folder / "checkpoints" / "step-00000001.partial").is_dir()
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
        assert not list(run.rglob("*.partial"))
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


@pytest.fixture(scope="module")
def often(tiny_options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny run with the checkpoints of its last three steps."""
    folder = tmp_path_factory.mktemp("often") / "run"
    assert run_in_process(tiny_options, folder, *OFTEN, "--keep", "3").status == 0
    return folder


@pytest.mark.parametrize("num_damaged", [1, 2])
@pytest.mark.parametrize("damage", [DAMAGES[name][0] for name in ("a byte", "truncated")])
def test_a_run_whose_newest_is_damaged_goes_on_to_the_same_weights(
    often: Path,
    tiny: Path,
    tiny_options: list[str],
    tmp_path: Path,
    damage: Damage,
    num_damaged: int,
) -> None:
    """The last one of a finished run, too, though its step comes again."""
    folder = tmp_path / "run"
    shutil.copytree(often, folder, symlinks=True)
    for step in (8, 7)[:num_damaged]:
        damage(folder / "checkpoints" / f"step-0000000{step}")
    ended = run_in_process(tiny_options, folder)
    assert ended.status == 0
    assert f"resuming from step {8 - num_damaged}\n" in ended.out
    assert ended.err.count("warning: passed over ") == num_damaged
    assert same_weights(folder, tiny)
    assert linked_step(folder) == 8
    assert [line["step"] for line in read_metrics(folder)] == STEPS


def test_a_run_with_nothing_whole_is_refused_in_one_line(
    often: Path, tiny_options: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(often, folder, symlinks=True)
    for path in (folder / "checkpoints").iterdir():
        flip_a_byte(path)
    ended = run_in_process(tiny_options, folder)
    assert ended.status == 1
    *warnings, error = ended.err.splitlines()
    assert len(warnings) == 3
    assert error.startswith(f"error: no checkpoint in {folder}/checkpoints is whole")


def test_a_copied_run_goes_on(tiny: Path, tiny_options: list[str], tmp_path: Path) -> None:
    stop = partial(before_step, 4, partial(get_signals, signal.SIGTERM))
    assert run_in_process(tiny_options, tmp_path / "run", fate=stop).status == 143
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert run_in_process(tiny_options, tmp_path / "copy").status == 0
    assert same_weights(tmp_path / "copy", tiny)


def check_full(ended_err: str, folder: Path, reason: str) -> None:
    assert ended_err == (
        f"error: the checkpoint of step 5 could not be written: {reason}; "
        f"the last one, {folder}/checkpoints/step-00000004, is whole\n"
    )
    assert linked_step(folder) == 4
    assert names(folder) == ["step-00000003", "step-00000004"]


@pytest.mark.parametrize(
    ("embedding_size", "limit", "reason"),
    [
        (16, 30_000, "Error while serializing: I/O error: File too large (os error 27)"),
        (16, 300_000, "File too large"),  # tokenizer.json
        (160, 600_000, "File too large"),  # state.pt
    ],
    ids=["weights", "tokenizer", "state"],
)
def test_a_disk_that_is_full_stops_the_run(
    tiny_options: list[str], tmp_path: Path, embedding_size: int, limit: int, reason: str
) -> None:
    options = [*tiny_options, "--embedding-size", str(embedding_size), *OFTEN]
    fate = partial(before_step, 5, partial(write_no_file_over, limit))
    ended = run_in_process(options, tmp_path / "run", fate=fate)
    assert ended.status == 1
    check_full(ended.err, tmp_path / "run", reason)
    assert run_in_process(options, tmp_path / "run").status == 0
    assert run_in_process(options, tmp_path / "whole").status == 0
    assert same_weights(tmp_path / "run", tmp_path / "whole")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = [needs_program("mount"), "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("to mount a file system is not permitted")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_really_is_full_stops_the_run(
    tiny: Path, tiny_options: list[str], small_disk: Path
) -> None:
    fate = partial(before_step, 5, partial(fill_disk, small_disk / "filler"))
    ended = run_in_process(tiny_options, small_disk, *OFTEN, "--report-every", "100", fate=fate)
    assert ended.status == 1
    (small_disk / "filler").unlink()
    assert "error: the checkpoint of step 5 could not be written: " in ended.err
    assert "o space left on device" in ended.err
    assert len(ended.err.splitlines()) == 1
    assert linked_step(small_disk) == 4
    assert run_in_process(tiny_options, small_disk).status == 0
    assert same_weights(small_disk, tiny)


def test_metrics_that_cannot_be_written_stop_the_run(
    tiny: Path, tiny_options: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    fate = partial(before_step, 5, partial(write_no_file_over, 700))
    ended = run_in_process(tiny_options, folder, fate=fate)
    assert ended.status == 1
    assert ended.err == f"error: [Errno 27] File too large: '{folder}/metrics.jsonl'\n"
    assert run_in_process(tiny_options, folder).status == 0
    assert same_weights(folder, tiny)
    assert [line["step"] for line in read_metrics(folder)] == STEPS
    assert checkpoint_state(folder)["step"] == 8
    assert json.loads((folder / "run.json").read_text())["settings"]["num_steps"] == 8
