"""A run that was trained in turns on a bare machine and at home ends as one that was not."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from scripts.bare_machine.__main__ import main
from scripts.bare_machine.pieces import hash_file
from tests.training.bare_machine.support import bare_environment, content, run_there
from tests.training.support import equal, read_metrics
from training import pretrain
from training.checkpoint import load_checkpoint

NUM_STEPS = 160
OPTIONS = [
    *("--embedding-size", "32", "--hidden-size", "32", "--layers", "2", "--heads", "2"),
    *("--max-positions", "64", "--length", "32", "--batch-size", "16", "--no-compile"),
    *("--steps", str(NUM_STEPS), "--device", "cpu", "--report-every", "5"),
]


@pytest.fixture(scope="module")
def at_home(parts: Path, vocab_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run, never interrupted."""
    folder = tmp_path_factory.mktemp("home") / "run"
    assert train_at_home(parts, vocab_dir, folder) == 0
    return folder


def train_at_home(shards: Path, vocab_dir: Path, folder: Path) -> int:
    where = ["--shards", str(shards), "--tokenizer", str(vocab_dir), "--output", str(folder)]
    return pretrain.main([*where, *OPTIONS])


@pytest.fixture(scope="module")
def job(parts: Path, vocab_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, packed for calls that carry little."""
    output = tmp_path_factory.mktemp("packed") / "job"
    where = ["--shards", str(parts), "--tokenizer", str(vocab_dir), "--output", str(output)]
    # What a run is measured on changes nothing in it.
    more = ["--validation", str(parts), "--max-load", "400KiB", "--piece-size", "48KiB"]
    assert main(["pack", *where, *more, "--", *OPTIONS]) == 0
    return output


@pytest.fixture(scope="module")
def machine(job: Path, bare_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A machine that was sent the job, and trained part of it until it was told to stop.

    What came back in several calls is in `back-0`, `back-1` and on.
    """
    folder = tmp_path_factory.mktemp("machine")
    loads = sorted(job.iterdir())
    assert len(loads) > 1
    for load in loads:
        shutil.copytree(load, folder / "here")
        done = run_there(bare_python, "here/run.py", "stage", "--stage", "stage", folder=folder)
        assert done.returncode == 0, done.stderr
        shutil.rmtree(folder / "here")
    assert "all is here" in done.stdout
    out = train_until_stopped(bare_python, folder)
    num_pieces = int(out.partition(" pieces")[0].rpartition(" ")[2])
    assert num_pieces > 8
    for place, begin in enumerate(range(4, num_pieces, 4), start=1):
        numbers = f"{begin}:{begin + 4}"
        command = ("stage/run.py", "send", numbers, "--out", f"back-{place}")
        assert run_there(bare_python, *command, folder=folder).returncode == 0
    return folder


def train_until_stopped(python: Path, folder: Path) -> str:
    """Stop training as the end of the call would, once it has gone some steps."""
    command = [str(python), "stage/run.py", "train", "--time-limit", "10m", "--out", "back-0"]
    with subprocess.Popen(
        [*command, "--piece-size", "64KiB"],
        cwd=folder,
        env=bare_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        metrics = folder / "stage" / "run" / "metrics.jsonl"
        while process.poll() is None and not (metrics.is_file() and metrics.stat().st_size):
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        out, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    assert "stopped in time; the next call goes on" in out
    return out


def assert_same_end(run: Path, other: Path) -> None:
    """The same weights and optimizers to the bit, after the same data."""
    states = [torch.load(folder / "checkpoint" / "state.pt") for folder in (run, other)]
    weights = [hash_file(folder / "checkpoint" / "model.safetensors") for folder in (run, other)]
    assert weights[0] == weights[1]
    for key in ("optimizers", "step", "tokens", "feeds", "num_steps"):
        assert equal(states[0][key], states[1][key]), key
    assert states[0]["step"] == NUM_STEPS
    assert [line["step"] for line in read_metrics(run)] == list(range(5, NUM_STEPS + 1, 5))


def test_a_run_that_was_begun_there_ends_here_as_if_never_sent(
    machine: Path, parts: Path, vocab_dir: Path, at_home: Path, tmp_path: Path
) -> None:
    back = sorted(map(str, machine.glob("back-*")))
    assert max(len(list(Path(folder).glob("*.piece"))) for folder in back) == 4
    assert main(["join", *back, "--output", str(tmp_path / "run")]) == 0
    step = torch.load(tmp_path / "run" / "checkpoint" / "state.pt")["step"]
    assert 0 < step < NUM_STEPS
    load_checkpoint(tmp_path / "run" / "checkpoint")
    assert train_at_home(parts, vocab_dir, tmp_path / "run") == 0
    assert_same_end(tmp_path / "run", at_home)


def test_a_run_goes_on_exactly_on_another_machine(
    machine: Path,
    parts: Path,
    vocab_dir: Path,
    at_home: Path,
    bare_python: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    back = sorted(map(str, machine.glob("back-*")))
    assert main(["join", *back, "--output", str(tmp_path / "run")]) == 0
    where = ["--shards", str(parts), "--tokenizer", str(vocab_dir)]
    given = [*where, "--resume", str(tmp_path / "run"), "--output", str(tmp_path / "job")]
    assert main(["pack", *given]) == 0
    assert ": code, shards, model, state\n" in capsys.readouterr().out
    command = ("train", "--time-limit", "10m", "--out", "out", "--max-pieces", "8")
    done = run_there(bare_python, "job/load-1/run.py", *command, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the run is done" in done.stdout
    assert "going on from step" in done.stdout
    assert main(["join", str(tmp_path / "out"), "--output", str(tmp_path / "run")]) == 0
    assert "the run is done" in capsys.readouterr().out
    assert_same_end(tmp_path / "run", at_home)


def test_what_is_there_has_no_more_than_was_sent(machine: Path) -> None:
    names = set(content(machine / "stage" / "jobs"))
    assert not any("albert_serve/service.py" in name or "tests" in name for name in names)


def test_a_limit_that_leaves_no_time(machine: Path, bare_python: Path, tmp_path: Path) -> None:
    command = ("train", "--time-limit", "50s", "--reserve", "49.9s", "--out", tmp_path / "out")
    done = run_there(bare_python, machine / "stage" / "run.py", *command, folder=tmp_path)
    assert done.returncode == 1
    assert "error: a limit of 50 s leaves no time to train: " in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_run_that_the_time_limit_stops(
    parts: Path, vocab_dir: Path, at_home: Path, bare_python: Path, tmp_path: Path
) -> None:
    """It begins with weights that are there, and goes on in a second call."""
    where = ["--shards", str(parts), "--tokenizer", str(vocab_dir)]
    where += ["--initialize-from", str(at_home / "checkpoint"), "--output", str(tmp_path / "job")]
    assert main(["pack", *where, "--", *OPTIONS, "--steps", "1000000"]) == 0
    run, steps = tmp_path / "job" / "load-1" / "run.py", []
    command = ("train", "--time-limit", "60s", "--reserve", "30s", "--out")
    for out in ("out-1", "out-2"):
        done = run_there(bare_python, run, *command, out, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "stopped in time; the next call goes on" in done.stdout
        assert main(["join", str(tmp_path / out), "--output", str(tmp_path / "run")]) == 0
        steps.append(int((tmp_path / "run" / "checkpoint").readlink().name[5:]))
    assert 0 < steps[0] < steps[1]
    record = json.loads((tmp_path / "run" / "checkpoint" / "training.json").read_bytes())
    assert len(record["stages"]) == 2
