"""Rows of files of training data, and the errors of all files in one list."""

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


class LeftOut(NamedTuple):
    """A row that is left out, and why."""

    reason: str


def read_records(
    file: Path,
    errors: list[str],
    delimiter: str | None = None,
    names_by_order: NamesByOrder | None = None,
) -> Iterator[Row]:
    """Yield the rows of a file, whose suffix gives the format, and append its errors.

    `.tsv`, `.csv`, `.jsonl`, `.ndjson` or `.json` (lines, or an array), optionally with `.gz`,
    `.bz2`, `.xz` or `.zst`; `.parquet`, or `.arrow` as `datasets` saves it. Files of other suffixes
    are TSV if the delimiter is given as a tab. A row that ends early has None in its last columns.
    """
    is_named = has_known_suffix(file) or ".json" in file.suffixes
    chosen: Format | None = "tsv" if not is_named and delimiter == "\t" else None
    if not (is_named or chosen):
        errors.append(f"{file}: the format is unknown; name it .csv, .tsv, .jsonl or .parquet")
        return
    options = ReadOptions(delimiter=delimiter, names_by_order=names_by_order)
    try:
        for row in read_rows(file, detect_type(file, chosen), options):
            if error := row.error or _long_text(row):
                errors.append(str(error))
            else:
                yield row
    except (AlbertServeError, OSError) as error:
        errors.append(str(error))


def _long_text(row: Row) -> str | None:
    """Return the error of a row with a text that would take gigabytes to tokenise."""
    for name, value in row.values.items():
        if isinstance(value, str) and len(value) > MAX_CHARS:
            return (
                f"{row.place}: the column {name!r} has {len(value):,} characters, at most "
                f"{MAX_CHARS:,} are read; split it, or leave it out"
            )
    return None


def gather_rows(
    files: Sequence[Path],
    read: Callable[[Path], Iterator[_ReadT | LeftOut]],
    name: str,
    errors: list[str],
) -> list[_ReadT]:
    """Return the rows of files, and print how many are left out; that there is none is an error.

    Args:
        errors: those of the files, which `read` appends.
    """
    rows: list[_ReadT] = []
    left_out: Counter[str] = Counter()
    num_before, reason = len(errors), f" in {', '.join(map(str, files))}"
    for row in chain.from_iterable(map(read, files)):
        if isinstance(row, LeftOut):
            left_out[row.reason] += 1
        else:
            rows.append(row)
    if left_out:
        counts = ", ".join(f"{count:,} {why}" for why, count in left_out.items())
        reason = f": {tell_left_out(left_out.total(), len(rows) + left_out.total(), counts)}"
    if not rows and len(errors) == num_before:
        errors.append(f"no {name}{reason}")
    return rows


def tell_left_out(num_left_out: int, num_rows: int, reason: str) -> str:
    """Print how many of all rows are left out and why; return the line."""
    line = f"{num_left_out:,} of {num_rows:,} rows are left out: {reason}"
    print(line)
    return line
