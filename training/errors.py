"""Exceptions of training, and their report by a command in one line.

TrainingError (ValueError)
├── CorpusError      a file of text or examples that cannot be read
├── VocabError       a vocabulary that cannot be trained or read
├── ShardError       a tokenised corpus that cannot be read or written
├── CheckpointError  a checkpoint that cannot be read or saved
├── OptimizerError   an invalid schedule, or a state of other optimizers
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

# Lines of an error that are shown.
_SHOWN_LINES: Final = 20
# A shell reports this status for a program that SIGINT ended.
_INTERRUPTED: Final = 128 + 2


class TrainingError(ValueError):
    """Base of all errors that training raises on purpose.

    An error of several faults has a line for each as its arguments, of which the first are shown.
    """

    def __str__(self) -> str:
        shown = list(map(str, self.args[:_SHOWN_LINES]))
        if len(self.args) > _SHOWN_LINES:
            shown.append(f"and {len(self.args) - _SHOWN_LINES:,} more")
        return "\n".join(shown)


class RunError(TrainingError):
    """A run that cannot be started or resumed."""


class EvaluationError(TrainingError):
    """Data that a checkpoint cannot be evaluated on."""


# The errors that are a user's.
REPORTED: Final = (TrainingError, AlbertServeError, OSError)


def report_errors(command: Callable[[], int]) -> int:
    """Run a command and return its exit status; report a user's error on stderr, with status 1.

    That of an interrupted command is 130.
    """
    prepare_output()
    threading.excepthook = _skip_os_errors
    try:
        return command()
    except KeyboardInterrupt as error:
        if not error.args:  # a run has said that it stopped
            print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    except REPORTED as error:
        print_error(error)
        return 1


def _skip_os_errors(arguments: threading.ExceptHookArgs) -> None:
    """Print the error of a thread, but a full disk's: TensorBoard passes that to its caller."""
    if not isinstance(arguments.exc_value, OSError):
        threading.__excepthook__(arguments)
