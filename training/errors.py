"""The errors of training, and which of them a command reports in one line.

TrainingError (ValueError)
├── CorpusError      a file of text or examples that cannot be read
├── VocabError       a vocabulary that cannot be trained or read
├── ShardError       a tokenised corpus that cannot be read or made
├── CheckpointError  a checkpoint that cannot be read or saved
├── OptimizerError   optimizers or a schedule that cannot be
├── RunError         a run that cannot start or go on
├── TeacherError     a teacher that cannot be loaded, or cannot teach this student
├── RecordError      a run's figures that cannot be read or drawn
└── EvaluationError  data that a checkpoint cannot be measured on
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final

from albert_serve.errors import AlbertServeError


class TrainingError(ValueError):
    """Base of all errors that training raises on purpose."""


_REPORTED: Final = (TrainingError, AlbertServeError, OSError)


def report_errors(command: Callable[[], int]) -> int:
    """The exit status of a command; an error of its user is one line on stderr, and status 1."""
    try:
        return command()
    except _REPORTED as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
