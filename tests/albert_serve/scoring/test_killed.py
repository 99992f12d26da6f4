"""A killed job resumes with the same command, and writes each row once, in order.

As a program, this module kills a job at every STEP-th of its file operations, resumes the job and
compares its output with an uninterrupted job. It prints the number of kills:
python -m tests.albert_serve.scoring.test_killed FOLDER SUFFIX STEP
If SUFFIX is `/`, the output is a folder of parts. Each run is a fork, so it starts immediately.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.albert_serve.scoring.jobs import read_rows, score, texts, write_jsonl
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
def test_a_job_killed_at_each_file_operation_resumes(
    suffix: str, step: int, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", __name__, str(tmp_path), suffix, str(step)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert int(process.stdout) > 10 / step


@pytest.mark.slow
def test_sigterm_ends_the_job_after_the_current_part(
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
    assert errors.splitlines()[-1].endswith("rows. Repeat the command to resume.")
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    assert [entry["num_rows"] for entry in entries] == [16] * len(entries)
    resumed = subprocess.check_output(command, cwd=ROOT, text=True)
    assert f"320 rows, 0 with errors, {16 * len(entries)} from an earlier run" in resumed
    assert [row["id"] for row in read_rows(output)] == [str(i) for i in range(320)]


def rows_of(output: str) -> list[dict[str, Any]]:
    """Read the rows of an output, which is a file or a folder of all parts."""
    if not output.endswith("/"):
        return read_rows(Path(output))
    assert (Path(output) / "_SUCCESS").exists()
    return [row for part in sorted(Path(output).glob("part-*")) for row in read_rows(part)]


def run(folder: Path, output: str, kill_at: int | None) -> bool:
    """Run the job in a process that is killed at a file operation. Return whether it finished."""
    count = 0

    def audit(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal count
        is_of_job = event.startswith(("open", "os.", "shutil.")) and any(
            str(folder) in str(argument) for argument in arguments
        )
        count += is_of_job
        if is_of_job and count == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    pid = os.fork()
    if pid == 0:
        sys.addaudithook(audit)
        score(folder / "in.jsonl", output, part_rows=20)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -signal.SIGKILL), code
    return code == 0


def main(folder: Path, suffix: str, step: int) -> None:
    write_jsonl(folder / "in.jsonl", texts(70))
    assert run(folder, f"{folder}/uninterrupted{suffix}", None)
    expected = rows_of(f"{folder}/uninterrupted{suffix}")
    assert len(expected) == 70
    output, num_kills = f"{folder}/out{suffix}", 0
    file, parts = Path(output.rstrip("/")), Path(f"{output.rstrip('/')}.parts")
    for kill_at in range(1, 10_000, step):
        shutil.rmtree(output, ignore_errors=True)
        shutil.rmtree(parts, ignore_errors=True)
        file.unlink(missing_ok=True)
        if run(folder, output, kill_at):
            break
        num_kills += 1
        run(folder, output, kill_at + 3)  # may be killed again, a few operations later
        assert run(folder, output, None)
        assert rows_of(output) == expected, kill_at
        assert not parts.exists(), kill_at
    sys.stdout.write(f"{num_kills}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
