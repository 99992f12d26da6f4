"""Kill a job at each of its file operations, let it go on, and compare the output.

Usage: python -m tests.albert_serve.scoring.kill_points FOLDER SUFFIX STEP

Each run is a fork, so that it starts at once. Prints the number of kills.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

from albert_serve.scoring.job import score_files
from albert_serve.scoring.options import ScoreOptions
from tests.albert_serve.scoring.jobs import HashScorer, texts, write_jsonl


def run(folder: Path, output: Path, kill_at: int | None) -> bool:
    """Run the job in a process that is killed at one of its file operations; whether it ended."""
    pid = os.fork()
    if pid == 0:
        count = 0

        def audit(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal count
            is_ours = event.startswith(("open", "os.", "shutil.", "sqlite3.")) and any(
                str(folder) in str(argument) for argument in arguments
            )
            count += is_ours
            if is_ours and count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

        if kill_at is not None:
            sys.addaudithook(audit)
        score_files(HashScorer(), [folder / "in.jsonl"], output, ScoreOptions(part_rows=20))
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    ended = os.waitstatus_to_exitcode(status)
    assert ended in (0, -signal.SIGKILL), ended
    return ended == 0


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
