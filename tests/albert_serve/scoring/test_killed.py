"""A job that is killed goes on with the same command, and writes the same bytes."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.albert_serve.scoring.jobs import SUFFIXES, write_jsonl
from tests.albert_serve.support import ROOT

TASK = ("--task", "text-classification", "--threads", "1", "--part-rows", "16")


@pytest.mark.slow
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_killed_at_each_file_operation(suffix: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.albert_serve.scoring.kill_points"]
    step = "1" if suffix == ".csv" else "3"
    done = subprocess.run(
        [*command, str(tmp_path), suffix, step], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10


@pytest.mark.parametrize("num_kills", [3, pytest.param(60, marks=pytest.mark.slow)])
def test_outputs_of_all_formats_after_kills_at_random_moments(
    num_kills: int, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "tests.albert_serve.scoring.random_kills"]
    done = subprocess.run(
        [*command, str(tmp_path), str(num_kills)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == num_kills * (len(SUFFIXES) + 1)


def started(bundle_dir: Path, source: Path, output: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "albert_serve", "score", *TASK),
            *("--bundle", str(bundle_dir), "--no-dedupe", str(source), output),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL),
    )


def wait_for_parts(process: subprocess.Popen[str], log: Path, num_parts: int) -> None:
    """Wait until so many parts are complete, or the job has ended."""
    while process.poll() is None:
        if log.exists() and log.read_bytes().count(b"\n") >= num_parts:
            return
        time.sleep(0.01)


@pytest.fixture
def source(tmp_path: Path, sentences: list[str]) -> Path:
    rows = [{"id": i, "text": f"{i} {sentences[i % len(sentences)]}"} for i in range(320)]
    return write_jsonl(tmp_path / "in.jsonl", rows)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_killed_at_random_moments(
    suffix: str, source: Path, bundle_dir: Path, tmp_path: Path
) -> None:
    whole = tmp_path / f"whole{suffix}"
    with started(bundle_dir, source, str(whole)) as process:
        process.communicate(timeout=600)
    output = tmp_path / f"out{suffix}"
    log = tmp_path / f"out{suffix}.parts/_parts.jsonl"
    generator = random.Random(suffix)
    num_kills = 0
    while not output.exists():
        with started(bundle_dir, source, str(output)) as process:
            wait_for_parts(process, log, 5 * (num_kills + 1))
            time.sleep(generator.uniform(0, 0.05))
            process.send_signal(signal.SIGKILL)
            num_kills += process.wait(timeout=600) == -signal.SIGKILL
    with started(bundle_dir, source, str(output)) as process:
        process.communicate(timeout=600)
    assert num_kills
    assert output.read_bytes() == whole.read_bytes()
    shutil.rmtree(log.parent, ignore_errors=True)


@pytest.mark.slow
def test_sigterm_ends_after_the_part(source: Path, bundle_dir: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.csv"
    log = tmp_path / "out.csv.parts/_parts.jsonl"
    with started(bundle_dir, source, str(output)) as process:
        wait_for_parts(process, log, 2)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=600)
    assert process.returncode == 143
    assert errors.splitlines()[-1].endswith("rows; the same command goes on")
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    assert [entry["counts"]["num_rows"] for entry in entries] == [16] * len(entries)
    assert os.listdir(log.parent).count(entries[-1]["file"]) == 1
    with started(bundle_dir, source, str(output)) as process:
        stdout, _ = process.communicate(timeout=600)
    assert process.returncode == 0
    assert f"320 rows, 0 with errors, {16 * len(entries)} from an earlier run" in stdout
