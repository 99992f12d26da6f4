"""Kill a job at each of its file operations, let it go on, and compare the rows of the output.

Usage: python -m tests.albert_serve.scoring.kill_points FOLDER SUFFIX STEP

The suffix / stands for a folder of parts.

Each run is a fork, so that it starts at once. Prints the number of kills.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from albert_serve.scoring.job import score_files
from albert_serve.scoring.options import ScoreOptions
from tests.albert_serve.scoring.jobs import HashScorer, read_any, texts, write_jsonl


def rows_of(output: str) -> list[dict[str, Any]]:
    """The rows of an output: a file, or a folder of complete parts."""
    if not output.endswith("/"):
        return read_any(Path(output))
    assert (Path(output) / "_SUCCESS").exists()
    return [row for part in sorted(Path(output).glob("part-*")) for row in read_any(part)]


def has_ended(pid: int) -> bool:
    """Wait for a fork; whether it ended before it was killed."""
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGKILL), code
    return code == 0


def run(folder: Path, output: str, kill_at: int | None) -> bool:
    """Run the job in a process that is killed at one of its file operations; whether it ended."""
    count = 0

    def audit(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal count
        is_ours = event.startswith(("open", "os.", "shutil.")) and any(
            str(folder) in str(argument) for argument in arguments
        )
        count += is_ours
        if is_ours and count == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    pid = os.fork()
    if pid == 0:
        sys.addaudithook(audit)
        score_files(HashScorer(), [folder / "in.jsonl"], output, ScoreOptions(part_rows=20))
        os._exit(0)
    return has_ended(pid)


def remove(output: str) -> None:
    """Remove an output, and the parts that were left."""
    shutil.rmtree(output, ignore_errors=True)
    shutil.rmtree(f"{output.rstrip('/')}.parts", ignore_errors=True)
    Path(output.rstrip("/")).unlink(missing_ok=True)


def main() -> None:
    """Run the command line."""
    folder, suffix, step = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    write_jsonl(folder / "in.jsonl", texts(70))
    assert run(folder, f"{folder}/whole{suffix}", None)
    expected = rows_of(f"{folder}/whole{suffix}")
    assert len(expected) == 70
    output = f"{folder}/out{suffix}"
    num_kills = 0
    for kill_at in range(1, 10_000, step):
        remove(output)
        if run(folder, output, kill_at):
            break
        num_kills += 1
        # Killed again a few operations later, before it may end.
        run(folder, output, kill_at + 3)
        assert run(folder, output, None)
        assert rows_of(output) == expected, kill_at
        assert not Path(f"{output.rstrip('/')}.parts").exists(), kill_at
    sys.stdout.write(f"{num_kills}\n")


if __name__ == "__main__":
    main()
