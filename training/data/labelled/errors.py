"""Errors in data, collected so that one report lists all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from training.data.corpus import CorpusError
from training.errors import TrainingError


@contextmanager
def collecting(errors: list[str], *kinds: type[TrainingError]) -> Iterator[None]:
    """Append the errors of data that is read, for `raise_listed` later; for `with`.

    Args:
        kinds: errors of data besides CorpusError.
    """
    try:
        yield
    except TrainingError as error:
        if not isinstance(error, (CorpusError, *kinds)):
            raise
        errors += error.args


def raise_listed(errors: Sequence[str]) -> None:
    """Raise the errors as one.

    Raises:
        CorpusError: there are errors, each of which is an argument.
    """
    if errors:
        raise CorpusError(*errors)
