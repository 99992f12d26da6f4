"""Kill a job at random moments, let it go on, and compare the output.

Usage: python -m tests.albert_serve.scoring.random_kills FOLDER NUM_KILLS

The output is a file of each format, and a folder of parts. Each is killed so many times, after a
random share of the time that a whole run takes. Prints the number of kills.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

from tests.albert_serve.scoring.jobs import SUFFIXES, texts, write_jsonl
from tests.albert_serve.scoring.kill_points import forked, has_ended


def content_of(output: str) -> dict[str, bytes]:
    """The bytes of a file, or of all files in a folder."""
    path = Path(output)
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return {file.name if path.is_dir() else "": file.read_bytes() for file in files}


def remove(output: str) -> None:
    """Remove a file or a folder."""
    if output.endswith("/"):
        shutil.rmtree(output)
    else:
        os.unlink(output)


def kill_and_compare(source: Path, output: str, num_kills: int) -> None:
    """Kill jobs so many times; those that end have the bytes of one that was not killed."""
    began_s = time.monotonic()
    assert has_ended(forked(source, output))
    duration_s = time.monotonic() - began_s
    expected = content_of(output)
    remove(output)
    num_left = num_kills
    while num_left:
        pid = forked(source, output)
        time.sleep(random.uniform(0, duration_s))
        os.kill(pid, signal.SIGKILL)
        if not has_ended(pid):
            num_left -= 1
            continue
        assert content_of(output) == expected, output
        remove(output)
    assert has_ended(forked(source, output))
    assert content_of(output) == expected, output


def main() -> None:
    """Run the command line."""
    folder, num_kills = Path(sys.argv[1]), int(sys.argv[2])
    source = write_jsonl(folder / "in.jsonl", texts(130))
    outputs = [f"{folder}/out{suffix}" for suffix in SUFFIXES] + [f"{folder}/out/"]
    for output in outputs:
        kill_and_compare(source, output, num_kills)
    left = {file.name for file in folder.iterdir()}
    assert left == {"in.jsonl", *(Path(output).name for output in outputs)}, left
    sys.stdout.write(f"{num_kills * len(outputs)}\n")


if __name__ == "__main__":
    main()
