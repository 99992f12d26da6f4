"""Becomes the program that its arguments name, told to stop should the one that began it be killed.

A function between fork and exec would do the same, but not safely beside threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def main(command: list[str]) -> None:
    """Take the program's place in this process."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
