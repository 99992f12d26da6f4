"""Whether a machine has what a job needs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from scripts.bare_machine.manifest import BareMachineError

_PROBE: Final = Path(__file__).with_name("probe.py")
_COMPILERS: Final = ("cc", "gcc", "clang")


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What a Python on a machine can do.

    Attributes:
        versions: of Python, by the name `python`, and of the modules that can be imported.
        failures: why the others cannot.
        device: the GPU in words; None where there is none.
    """

    versions: Mapping[str, str]
    failures: Mapping[str, str]
    device: str | None

    def check(self) -> None:
        """See that nothing is missing.

        Raises:
            BareMachineError: a module cannot be imported.
        """
        if not self.failures:
            return
        reasons = "; ".join(f"{name} ({why})" for name, why in self.failures.items())
        raise BareMachineError(
            f"{sys.executable} cannot import {reasons}. Run this with a Python that can, or pack "
            f"the job with --wheels: pip download --no-deps {' '.join(self.failures)}"
        )

    def notes(self, versions: Mapping[str, str], options: Sequence[str]) -> list[str]:
        """What is worth saying: the machine, and where it is unlike the one that packed the job.

        Args:
            versions: on the machine that packed it.
            options: of training.
        """
        known = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        notes = [f"{known}; {self.device or 'no GPU that torch can use: the CPU trains'}"]
        other = {n: v for n, v in versions.items() if self.versions.get(n, v) != v}
        if other:
            there = ", ".join(f"{name} {version}" for name, version in other.items())
            notes.append(f"note: packed with {there}; the last digits of sums may differ")
        if "--no-compile" not in options and not any(map(shutil.which, _COMPILERS)):
            notes.append("note: there is no C compiler, which torch.compile needs: --no-compile")
        return notes


def examine(modules: Sequence[str], environment: Mapping[str, str]) -> Machine:
    """Import the modules in a Python of its own.

    Raises:
        BareMachineError: it ended without an answer.
    """
    done = subprocess.run(
        [sys.executable, str(_PROBE), *modules],
        env=dict(environment),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0 or not done.stdout.strip():
        raise BareMachineError(
            f"{sys.executable} ended with status {done.returncode} on importing "
            f"{', '.join(modules)}: {done.stderr.strip()[-500:]}"
        )
    return Machine(**json.loads(done.stdout.strip().splitlines()[-1]))


def training_environment(job: Path) -> dict[str, str]:
    """The variables that a job's programs run with: its code and modules come first."""
    paths = [str(job / "code"), str(job / "modules")]
    before = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*paths, before] if before else paths),
        "PYTHONUNBUFFERED": "1",
    }
