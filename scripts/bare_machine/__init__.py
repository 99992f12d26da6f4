"""Training on a machine that has torch and no network.

`python -m scripts.bare_machine pack` makes folders that are sent there, `run.py` in them trains
within a limit of time and writes its newest checkpoint in pieces, and `join` puts these together
at home. docs/bare-machine.md has the whole round.

What travels is `run.py` (launcher.py) and the modules that `TRAVELLING` names, which need the
standard library alone.
"""

from __future__ import annotations

from typing import Final

TRAVELLING: Final = (
    "__init__",
    "child",
    "environment",
    "machine",
    "manifest",
    "options",
    "pieces",
    "probe",
    "run_folder",
    "stage",
    "tethered",
)
