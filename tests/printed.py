"""The commands that a document prints, and a clone of the repository to run them in.

A document's sizes and times are too much for a test. What a test has in their place it appends to
the command, which otherwise runs as printed: of an option that is given twice, the last counts.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).parents[1]
_TREES: Final = ("models", "tests", "training", "export", "albert_serve", "examples")


def printed_commands(document: str, program: str) -> list[str]:
    """The commands of the document's first shell block that has this program, without comments."""
    text = (REPOSITORY / document).read_text(encoding="utf-8")
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    block = next(each for each in blocks if program in each)
    lines = (line for line in block.splitlines() if not line.startswith("#"))
    commands = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [command for command in commands if command.strip()]


def run_printed(
    commands: Sequence[str],
    folder: Path,
    appended: Mapping[str, str] | None = None,
    timeout_s: float = 900,
) -> list[str]:
    """Run commands in a folder as in a clone of the repository; return what each printed.

    Args:
        appended: options to append, by the command of `albert-serve` that they are for.
        timeout_s: for each command.
    """
    for name in _TREES:
        link = folder / name
        if not link.exists():
            link.symlink_to(REPOSITORY / name)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(folder)}
    outputs = []
    for command in commands:
        verb = command.split()[1]
        ended = subprocess.run(
            f"{command} {(appended or {}).get(verb, '')}",
            shell=True,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        assert ended.returncode == 0, f"{command}\n{ended.stdout}{ended.stderr}"
        outputs.append(ended.stdout)
    return outputs
