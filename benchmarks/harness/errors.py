"""The error of all benchmarks, and the error message of a child process."""

from __future__ import annotations

from pathlib import Path

from training.errors import TrainingError


class BenchmarkError(TrainingError):
    """A benchmark that cannot be run."""


def last_line(log: Path) -> str:
    """The last line that a process printed: its error, as a rule."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
