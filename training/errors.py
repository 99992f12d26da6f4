"""Exceptions of training, and their one-line report by a command.

TrainingError (ValueError)
├── CorpusError      a file of text or examples that cannot be read
├── VocabError       a vocabulary that cannot be trained or read
├── ShardError       a tokenised corpus that cannot be read or written
├── CheckpointError  a checkpoint that cannot be read or saved
├── OptimizerError   an invalid schedule, or a saved state of another optimizer
├── RunError         a run that cannot be started or resumed
└── EvaluationError  data that a checkpoint cannot be evaluated on
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Final

from albert_serve.errors import AlbertServeError
from albert_serve.terminal import prepare_output, print_error

# Maximum number of lines of an error to show.
_MAX_LINES: Final = 20
# A shell reports this status for a program that SIGINT ended.
_INTERRUPTED: Final = 128 + 2


class TrainingError(ValueError):
    """Base of all errors that training raises on purpose.

    Each argument is a line about one fault. Only the first lines are shown.
    """

    def __str__(self) -> str:
        lines = list(map(str, self.args[:_MAX_LINES]))
        if len(self.args) > _MAX_LINES:
            lines.append(f"and {len(self.args) - _MAX_LINES:,} more")
        return "\n".join(lines)


class RunError(TrainingError):
    """A run that cannot be started or resumed."""


class EvaluationError(TrainingError):
    """Data that a checkpoint cannot be evaluated on."""


# Errors that users can fix, so that they need no traceback.
REPORTED: Final = (TrainingError, AlbertServeError, OSError)


def report_errors(command: Callable[[], int]) -> int:
    """Run a command and return its exit status.

    An error that users can fix is reported on stderr, with status 1. If the command is interrupted,
    the status is 130.
    """
    prepare_output()
    threading.excepthook = _skip_os_errors
    try:
        return command()
    except KeyboardInterrupt as error:
        if not error.args:  # With arguments, a run has already printed that it stopped.
            print("Interrupted.", file=sys.stderr)
        return _INTERRUPTED
    except REPORTED as error:
        print_error(error)
        return 1


def _skip_os_errors(arguments: threading.ExceptHookArgs) -> None:
    """Print a thread's error, except an OSError, which TensorBoard also raises in its caller."""
    if not isinstance(arguments.exc_value, OSError):
        threading.__excepthook__(arguments)
