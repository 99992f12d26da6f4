"""A command that is killed at any moment, and given again, ends as one that was not killed.

Commands as they are given in a shell: with as many threads as the machine has, compiled unless
they say otherwise. Where they are when they are killed is left to chance.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.training.support import REPOSITORY, WIKI, same_weights
from training.loop.progress import read_record

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
def test_a_killed_run_ends_with_the_weights_of_one_that_was_not(
    commands: dict[str, list[str]], name: str, tmp_path: Path
) -> None:
    check(commands[name], tmp_path, num_deaths=2)
