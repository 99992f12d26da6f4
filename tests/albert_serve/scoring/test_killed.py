"""A job that is killed goes on with the same command, and has each row once, in order."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.albert_serve.scoring.jobs import read_table, write_jsonl
from tests.albert_serve.support import ROOT

pytestmark = pytest.mark.process


@pytest.mark.parametrize(
    ("suffix", "step"),
    [
        (".csv", 5),
        *(
            pytest.param(suffix, 1, marks=pytest.mark.slow)
            for suffix in (".csv", ".jsonl.gz", ".parquet", "/")
        ),
    ],
)
def test_killed_at_each_file_operation(suffix: str, step: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.albert_serve.scoring.kill_points"]
    command += [str(tmp_path), suffix, str(step)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10 / step


@pytest.mark.slow
def test_sigterm_ends_after_the_part(
    sentences: list[str], bundle_dir: Path, tmp_path: Path
) -> None:
    rows = [{"id": i, "text": f"{i} {sentences[i % len(sentences)]}"} for i in range(320)]
    source, output = write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out.csv"
    command = [sys.executable, "-m", "albert_serve", "score", "--task", "text-classification"]
    command += ["--threads", "1", "--part-rows", "16", "--bundle", str(bundle_dir)]
    command += [str(source), str(output)]
    log = tmp_path / "out.csv.parts/_parts.jsonl"
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL),
    ) as process:
        while process.poll() is None and not (log.exists() and len(log.read_bytes()) > 300):
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=600)
    assert process.returncode == 143
    assert errors.splitlines()[-1].endswith("rows; the same command goes on")
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    assert [entry["num_rows"] for entry in entries] == [16] * len(entries)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert f"320 rows, 0 with errors, {16 * len(entries)} from an earlier run" in done.stdout
    assert [row["id"] for row in read_table(output)] == [str(i) for i in range(320)]
