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

from tests.training.distillation.teachers import make_bert
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
def pretraining(vocab_dir: Path) -> list[str]:
    """A run of 16 steps of 4,096 tokens, enough for all threads, with dropout."""
    return [
        *("training.pretrain", "--corpus", str(WIKI), "--tokenizer", str(vocab_dir)),
        *("--embedding-size", "64", "--hidden-size", "64", "--layers", "3", "--heads", "2"),
        *("--max-positions", "64", "--length", "64", "--batch-size", "64", "--steps", "16"),
        *("--dropout", "v1", "--lr", "1e-2", "--adamw-lr", "1e-2"),
    ]


@pytest.fixture
def finetuning(finetune_options: list[str]) -> list[str]:
    """A run of 20 steps, each with enough tokens for all threads."""
    sizes = ["--batch-size", "64", "32", "32"]
    return ["training.finetune", *finetune_options, *sizes, "--steps", "20"]


@pytest.mark.slow
def test_pretraining(pretraining: list[str], tmp_path: Path) -> None:
    check([*pretraining, "--no-compile"], tmp_path, num_deaths=1)


@pytest.mark.slow
def test_finetuning(finetuning: list[str], tmp_path: Path) -> None:
    check(finetuning, tmp_path, num_deaths=2)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["muon", "adamw", "lamb"])
def test_compiled_pretraining(pretraining: list[str], optimizer: str, tmp_path: Path) -> None:
    check([*pretraining, "--optimizer", optimizer], tmp_path, num_deaths=3)


@pytest.mark.slow
def test_compiled_distillation(easy_corpus: Path, vocab_dir: Path, tmp_path: Path) -> None:
    """With the student's start from its teacher."""
    command = [
        *("training.distil", "--teacher", str(make_bert(tmp_path / "teacher"))),
        *("--corpus", str(easy_corpus), "--tokenizer", str(vocab_dir)),
        *("--relation-weight", "1", "--embedding-size", "32", "--length", "64"),
        *("--batch-size", "64", "--steps", "20", "--lr", "1e-2", "--adamw-lr", "1e-2"),
    ]
    check(command, tmp_path, num_deaths=2)
