"""Kill a job at each of its file operations, let it go on, and compare the output.

Usage: python -m tests.albert_serve.scoring.kill_points FOLDER SUFFIX STEP

Each run is a fork, so that it starts at once. Prints the number of kills.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from albert_serve.scoring.formats import Format
from albert_serve.scoring.job import score_files
from albert_serve.scoring.options import ScoreOptions
from tests.albert_serve.scoring.jobs import HashScorer, texts, write_jsonl

PART_ROWS = 20


def forked(
    source: Path, output: Path | str, watch: Callable[[str, tuple[object, ...]], None] | None = None
) -> int:
    """Start the job in a fork, with an audit hook; returns its process id."""
    pid = os.fork()
    if pid == 0:
        if watch is not None:
            sys.addaudithook(watch)
        options = ScoreOptions(part_rows=PART_ROWS, output_format=format_of(output))
        score_files(HashScorer(), [source], output, options)
        os._exit(0)
    return pid


def format_of(output: Path | str) -> Format | None:
    """The format of the parts in a folder."""
    return "parquet" if str(output).endswith("/") else None


def has_ended(pid: int) -> bool:
    """Wait for a fork; whether it ended before it was killed."""
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGKILL), code
    return code == 0


def run(folder: Path, output: Path, kill_at: int | None) -> bool:
    """Run the job in a process that is killed at one of its file operations; whether it ended."""
    count = 0

    def audit(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal count
        is_ours = event.startswith(("open", "os.", "shutil.", "sqlite3.")) and any(
            str(folder) in str(argument) for argument in arguments
        )
        count += is_ours
        if is_ours and count == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    return has_ended(forked(folder / "in.jsonl", output, None if kill_at is None else audit))


def main() -> None:
    """Run the command line."""
    folder, suffix, step = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    write_jsonl(folder / "in.jsonl", texts(70))
    whole = folder / f"whole{suffix}"
    assert run(folder, whole, None)
    expected = whole.read_bytes()
    num_kills = 0
    for kill_at in range(1, 10_000, step):
        output = folder / f"out{suffix}"
        output.unlink(missing_ok=True)
        shutil.rmtree(folder / f"out{suffix}.parts", ignore_errors=True)
        if run(folder, output, kill_at):
            break
        num_kills += 1
        # Killed again a few operations later, before it may end.
        run(folder, output, kill_at + 3)
        assert run(folder, output, None)
        assert output.read_bytes() == expected, kill_at
        assert not (folder / f"out{suffix}.parts").exists(), kill_at
    sys.stdout.write(f"{num_kills}\n")


if __name__ == "__main__":
    main()
