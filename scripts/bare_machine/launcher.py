"""Trains on this machine; `python3 run.py --help` says how."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036  a bare machine's may be any
    sys.exit("error: Python 3.11 or newer is needed; this is " + sys.version.split()[0])

from pathlib import Path

from scripts.bare_machine.machine import main

if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent))
