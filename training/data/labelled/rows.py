"""Rows of training files, and a list of the errors in all files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import NamedTuple, TypeVar

from albert_serve.api.wire import MAX_CHARS
from albert_serve.errors import AlbertServeError
from albert_serve.tables import ReadOptions, Row, read_rows
from albert_serve.tables.formats import Format, detect_type, has_known_suffix
from albert_serve.tables.rows import NamesByOrder
from training.data.corpus import CorpusError
from training.errors import TrainingError

_ReadT = TypeVar("_ReadT")


@contextmanager
def collecting(errors: list[str], *kinds: type[TrainingError]) -> Iterator[None]:
    """Append the data errors of a `with` block to a list, which `raise_listed` raises later.

    Args:
        kinds: types of errors to append, in addition to CorpusError.
    """
    collected: tuple[type[TrainingError], ...] = (CorpusError, *kinds)
    try:
        yield
    except collected as error:
        errors += error.args


def raise_listed(errors: Sequence[str]) -> None:
    """Raise all errors together, if there are any.

    Raises:
        CorpusError: the list is not empty. Each error is an argument.
    """
    if errors:
        raise CorpusError(*errors)


class OmittedRow(NamedTuple):
    """An omitted row, and the reason."""

    reason: str


def read_records(
    file: Path,
    errors: list[str],
    delimiter: str | None = None,
    names_by_order: NamesByOrder | None = None,
) -> Iterator[Row]:
    """Yield the rows of a file, and append its errors to `errors`.

    The suffix gives the format: `.tsv`, `.csv`, `.jsonl`, `.ndjson` or `.json` (lines or an array),
    optionally with `.gz`, `.bz2`, `.xz` or `.zst`; `.parquet`; or `.arrow`, written by `datasets`.
    Files with other suffixes are TSV if `delimiter` is a tab. If a row has too few cells, its last
    columns are None.
    """
    is_named = has_known_suffix(file) or ".json" in file.suffixes
    default: Format | None = "tsv" if not is_named and delimiter == "\t" else None
    if not (is_named or default):
        errors.append(f"{file} has no known suffix. Rename it to .csv, .tsv, .jsonl or .parquet.")
        return
    options = ReadOptions(delimiter=delimiter, names_by_order=names_by_order)
    try:
        for row in read_rows(file, detect_type(file, default), options):
            if error := row.error or _long_text(row):
                errors.append(str(error))
            else:
                yield row
    except (AlbertServeError, OSError) as error:
        errors.append(str(error))


def _long_text(row: Row) -> str | None:
    """Return an error if tokenising a text of the row would need gigabytes."""
    for name, value in row.values.items():
        if isinstance(value, str) and len(value) > MAX_CHARS:
            return (
                f"{row.location}: the column {name!r} has {len(value):,} characters; the maximum "
                f"is {MAX_CHARS:,}. Split the text, or omit it."
            )
    return None


def gather_rows(
    files: Sequence[Path],
    read: Callable[[Path], Iterator[_ReadT | OmittedRow]],
    name: str,
    errors: list[str],
) -> list[_ReadT]:
    """Return the rows of files, and print the number of omitted rows.

    It is an error if the files have no rows, unless they have other errors.

    Args:
        read: function that yields the rows of a file, and appends its errors to `errors`.
        name: plural noun for the rows, for the message of that error.
    """
    rows: list[_ReadT] = []
    omitted: Counter[str] = Counter()
    num_errors, reason = len(errors), f" in {', '.join(map(str, files))}."
    for row in chain.from_iterable(map(read, files)):
        if isinstance(row, OmittedRow):
            omitted[row.reason] += 1
        else:
            rows.append(row)
    if omitted:
        counts = ", ".join(f"{count:,} {why}" for why, count in omitted.items())
        reason = f": {print_omitted(omitted.total(), len(rows) + omitted.total(), counts)}"
    if not rows and len(errors) == num_errors:
        errors.append(f"There are no {name}{reason}")
    return rows


def print_omitted(num_omitted: int, num_rows: int, reason: str) -> str:
    """Print the number of omitted rows with the reason, and return the line."""
    line = f"{num_omitted:,} of {num_rows:,} rows are omitted: {reason}."
    print(line)
    return line
