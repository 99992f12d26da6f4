"""Exceptions of training, and their report by a command in one line.

TrainingError (ValueError)
├── CorpusError      a file of text or examples that cannot be read
├── VocabError       a vocabulary that cannot be trained or read
├── ShardError       a tokenised corpus that cannot be read or written
├── CheckpointError  a checkpoint that cannot be read or saved
├── OptimizerError   invalid settings of optimizers or a schedule
├── RunError         a run that cannot be started or resumed
│   └── DivergedError    one whose gradient stays not finite
├── TeacherError     a teacher that cannot be loaded, or cannot teach this student
├── RecordError      a run's metrics that cannot be read or drawn
└── EvaluationError  data that a checkpoint cannot be evaluated on
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from albert_serve.errors import AlbertServeError

# Lines of an error that are shown.
_SHOWN_LINES: Final = 20


class TrainingError(ValueError):
    """Base of all errors that training raises on purpose.

    An error of several faults has a line for each as its arguments, of which the first are shown.
    """

    def __str__(self) -> str:
        shown = list(map(str, self.args[:_SHOWN_LINES]))
        if self.num_hidden:
            shown.append(f"and {self.num_hidden:,} more")
        return "\n".join(shown)

    @property
    def num_hidden(self) -> int:
        """The lines that are not shown."""
        return max(0, len(self.args) - _SHOWN_LINES)


class EvaluationError(TrainingError):
    """Data that a checkpoint cannot be evaluated on."""


# The errors that are a user's.
REPORTED: Final = (TrainingError, AlbertServeError, OSError)


def report_errors(command: Callable[[], int], lines_file: Path | None = None) -> int:
    """Run a command and return its exit status; report a user's error on stderr, with status 1.

    Args:
        lines_file: written with all lines of an error that has more than are shown; a file of an
            earlier command is removed.
    """
    try:
        if lines_file is not None:
            lines_file.unlink(missing_ok=True)
        return command()
    except REPORTED as error:
        _report(error, lines_file)
        return 1


def _report(error: Exception, lines_file: Path | None) -> None:
    print(f"error: {error}", file=sys.stderr)
    if lines_file is None or not isinstance(error, TrainingError) or not error.num_hidden:
        return
    try:
        lines_file.parent.mkdir(parents=True, exist_ok=True)
        text = "".join(f"{line}\n" for line in error.args)
        lines_file.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as failure:
        print(f"error: {lines_file} cannot be written: {failure.strerror}", file=sys.stderr)
    else:
        print(f"all {len(error.args):,} are listed in {lines_file}", file=sys.stderr)
