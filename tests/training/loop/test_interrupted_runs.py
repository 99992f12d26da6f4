"""Runs that are killed, damaged or stopped while they save go on to the same weights."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from tests.training.loop.damages import DAMAGES, linked_step, names
from tests.training.processes import (
    before_step,
    die_before_change,
    run_in_process,
    sleep,
    start,
    write_no_file_over,
)
from tests.training.support import read_metrics, same_weights

STEPS = list(range(1, 9))


OFTEN = ("--save-every", "0.0001s")


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


def test_a_run_whose_newest_is_damaged_goes_on_to_the_same_weights(
    tiny: Path, tiny_options: list[str], tmp_path: Path
) -> None:
    """The last two of a finished run, though their steps come again."""
    folder = tmp_path / "run"
    assert run_in_process(tiny_options, folder, *OFTEN, "--keep", "3").status == 0
    for step, (damage, _) in zip((8, 7), DAMAGES.values(), strict=False):
        damage(folder / "checkpoints" / f"step-0000000{step}")
    ended = run_in_process(tiny_options, folder)
    assert ended.status == 0
    assert "resuming from step 6\n" in ended.out
    assert ended.err.count("warning: passed over ") == 2
    assert same_weights(folder, tiny)
    assert linked_step(folder) == 8
    assert [line["step"] for line in read_metrics(folder)] == STEPS


@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        (30_000, "Error while serializing: I/O error: File too large (os error 27)"),  # weights
        (300_000, "File too large"),  # tokenizer.json
    ],
)
def test_a_disk_that_is_full_stops_the_run(
    tiny: Path, tiny_options: list[str], tmp_path: Path, limit: int, reason: str
) -> None:
    folder = tmp_path / "run"
    fate = partial(before_step, 5, partial(write_no_file_over, limit))
    ended = run_in_process(tiny_options, folder, *OFTEN, fate=fate)
    assert ended.status == 1
    assert ended.err == (
        f"error: the checkpoint of step 5 could not be written: {reason}; "
        f"the last one, {folder}/checkpoints/step-00000004, is whole\n"
    )
    assert names(folder) == ["step-00000003", "step-00000004"]
    assert run_in_process(tiny_options, folder).status == 0
    assert same_weights(folder, tiny)
