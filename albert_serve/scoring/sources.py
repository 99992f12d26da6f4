"""The rows of a job's input: files in CSV, TSV, JSONL or Parquet, one after another."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final

from albert_serve.errors import (
    AlbertServeError,
    BodyTooLargeError,
    InvalidInputError,
    MalformedRequestError,
)
from albert_serve.scoring.arrow_values import plain_values
from albert_serve.scoring.errors import ChangedJobError, first_line
from albert_serve.scoring.formats import (
    DELIMITERS,
    MAX_LINE_BYTES,
    FileType,
    Format,
    bounded_lines,
    detect_type,
    is_stream,
    opened,
    optional_module,
)

_ROWS_A_BATCH: Final = 1024
_BYTES_A_BATCH: Final = 4 << 20
# Of a column, so that row groups may have any size.
_PARQUET_READ_BYTES: Final = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One row of the input.

    Attributes:
        place: file and line, or row; for messages.
        values: by column; of Parquet, those that the task reads.
        num_bytes: the approximate size of what the task reads, or of what is kept if it is larger.
        is_text: whether all values are text, as those of CSV are.
        error: why the row cannot be read.
        batch: of Parquet, the columns that are kept, of this row and its neighbours.
        index: the row's index in `batch`.
    """

    place: str
    values: dict[str, Any] = field(default_factory=dict)
    num_bytes: int = 0
    is_text: bool = False
    error: AlbertServeError | None = None
    batch: Any = None
    index: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """An input file.

    Attributes:
        columns: the names and types of its columns; types are Arrow's, None for text. None for
            JSONL, whose rows have columns of their own.
        version: of the content when it was opened; None of a stream.
    """

    path: Path
    type: FileType
    columns: Mapping[str, Any] | None
    has_quotes: bool = True
    version: tuple[int, ...] | None = None

    @classmethod
    def open(cls, path: Path, chosen: Format | None = None, *, has_quotes: bool = True) -> Source:
        """Look at a file's format and columns.

        Raises:
            InvalidInputError: it is damaged, empty, or of a format that is not read.
            ConfigError: a package that reads it is not installed.
            OSError: it cannot be read.
        """
        version = _version(path)
        kind = detect_type(path, chosen)
        columns: dict[str, Any] | None = None
        if kind.format == "parquet":
            columns = _parquet_columns(path)
        elif kind.is_table and not is_stream(path):
            with opened(path, kind.compression) as (_, stream):
                columns = dict.fromkeys(_header(path, _rows(path, kind, stream, has_quotes)))
        return cls(path=path, type=kind, columns=columns, has_quotes=has_quotes, version=version)

    @property
    def num_bytes(self) -> int:
        """The size on disk when it was opened; 0 of a stream."""
        return 0 if self.version is None else self.version[2]

    def check_unchanged(self) -> None:
        """Check that the file is the one that was opened.

        Raises:
            ChangedJobError: it was written to, is another one, or is gone.
        """
        if self.version is not None and _version(self.path) != self.version:
            raise ChangedJobError(
                f"{self.path} changed while it was read; score a file that nothing writes to, with "
                "--restart"
            )


def _version(path: Path) -> tuple[int, ...] | None:
    if is_stream(path) or not path.exists():
        return None
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class Reader:
    """Reads the records of several sources in order, and knows how far it is.

    Args:
        fields: the columns that the task reads, where there are such.
        keep: the columns that are kept; None for all.
    """

    def __init__(
        self, sources: Sequence[Source], fields: Sequence[str], keep: Sequence[str] | None
    ) -> None:
        self._sources = sources
        self._fields = fields
        self._keep = keep
        self._num_bytes_before = 0
        self._file: BinaryIO | None = None
        self._share = 0.0

    @property
    def num_bytes(self) -> int:
        """The bytes on disk that have been read."""
        if self._file is None or self._file.closed:  # closed where it is damaged
            return self._num_bytes_before + int(self._share)
        return self._num_bytes_before + self._file.tell()

    def read(self, num_skipped: int = 0) -> Iterator[Record]:
        """Yield the records after the first so many.

        Raises:
            InvalidInputError: a file is damaged or incomplete, or CSV that cannot be read.
            ChangedJobError: a file is not the one that was opened.
            OSError: a file cannot be read.
        """
        for source in self._sources:
            prefix = f"{source.path}, " if len(self._sources) > 1 else ""
            read = self._parquet if source.type.format == "parquet" else self._text
            try:
                num_rows = yield from read(source, prefix, num_skipped)
            except (InvalidInputError, OSError):
                source.check_unchanged()
                raise
            source.check_unchanged()
            num_skipped = max(0, num_skipped - num_rows)
            self._file, self._share = None, 0.0
            self._num_bytes_before += source.num_bytes

    def _text(self, source: Source, prefix: str, num_skipped: int) -> Generator[Record, None, int]:
        """Yield the records of lines; returns the number of all rows, also those skipped."""
        with opened(source.path, source.type.compression) as (raw, stream):
            self._file = None if is_stream(source.path) else raw
            if source.type.format == "jsonl":
                lines = enumerate(bounded_lines(stream), start=1)
                numbered = ((n, line) for n, line in lines if line is None or line.strip())
                number = 0
                for number, (line_number, line) in enumerate(numbered, start=1):
                    if number > num_skipped:
                        yield _from_json(f"{prefix}line {line_number}", line)
                return number
            rows = _rows(source.path, source.type, stream, source.has_quotes)
            names = _header(source.path, rows)
            number = 0
            for number, (line_number, cells) in enumerate(rows, start=1):
                if number > num_skipped:
                    yield _from_cells(f"{prefix}line {line_number}", names, cells)
            return number

    def _parquet(
        self, source: Source, prefix: str, num_skipped: int
    ) -> Generator[Record, None, int]:
        """Yield the records of row groups; returns the number of all rows."""
        pa = optional_module("pyarrow", "Parquet")
        pq = optional_module("pyarrow.parquet", "Parquet")
        names = list(source.columns or ())
        keep = [name for name in names if self._keep is None or name in self._keep]
        fields = [name for name in names if name in self._fields]
        read_columns = [name for name in names if name in {*keep, *fields}]
        try:
            with pq.ParquetFile(
                source.path,
                pre_buffer=False,
                buffer_size=_PARQUET_READ_BYTES,
                page_checksum_verification=True,  # of files that have checksums
            ) as file:
                num_rows: int = file.metadata.num_rows
                number = 0
                for group in range(file.num_row_groups):
                    about = file.metadata.row_group(group)
                    num_in_group = about.num_rows
                    if number + num_in_group <= num_skipped:
                        number += num_in_group
                        continue
                    num_fitting = _BYTES_A_BATCH * num_in_group // max(1, about.total_byte_size)
                    for batch in file.iter_batches(
                        min(max(1, num_fitting), _ROWS_A_BATCH),
                        row_groups=[group],
                        columns=read_columns,
                        # Each of Arrow's threads would keep memory that others have freed.
                        use_threads=False,
                    ):
                        start = max(0, num_skipped - number)
                        yield from records_of(batch, fields, keep, f"{prefix}row ", number, start)
                        number += batch.num_rows
                        self._share = source.num_bytes * number / max(1, num_rows)
                return num_rows
        except (pa.ArrowInvalid, pa.ArrowException) as error:
            raise _damaged(source.path, error) from error
        except OSError as error:
            if error.errno is not None:
                raise
            raise _damaged(source.path, error) from error


def records_of(
    batch: Any, fields: Sequence[str], keep: Sequence[str], place: str, number: int, start: int = 0
) -> Iterator[Record]:
    """Yield the rows of an Arrow batch.

    Args:
        place: what precedes a row's number in its place.
        number: the rows before the batch.
        start: the first row that is wanted.
    """
    kept = batch.select(keep)
    read = batch.select(fields)
    kept_bytes = kept.nbytes // max(1, batch.num_rows)
    for index in range(start, batch.num_rows):
        values = plain_values(read, index)
        num_bytes = max(kept_bytes, sum(_size(value) for value in values.values()))
        yield Record(
            place=f"{place}{number + index + 1}",
            values=values,
            num_bytes=num_bytes,
            batch=kept,
            index=index,
        )


def _size(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    return sum(map(_size, value)) if isinstance(value, list) else 8


def _parquet_columns(path: Path) -> dict[str, Any]:
    pa = optional_module("pyarrow", f"{path} is Parquet, which")
    pq = optional_module("pyarrow.parquet", f"{path} is Parquet, which")
    if is_stream(path):
        raise InvalidInputError(f"Parquet cannot be read from a pipe; write {path} to a file")
    try:
        schema = pq.read_schema(path)
    except (pa.ArrowInvalid, pa.ArrowException) as error:
        raise _damaged(path, error) from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise _damaged(path, error) from error
    twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if twice:
        raise InvalidInputError(f"{path} has several columns {twice[0]!r}; rename all but one")
    return dict(zip(schema.names, schema.types, strict=True))


def _damaged(path: Path, error: Exception) -> InvalidInputError:
    return InvalidInputError(f"{path} is damaged or incomplete: {first_line(error)}")


def _rows(
    path: Path, kind: FileType, stream: Any, has_quotes: bool
) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of CSV or TSV that are not blank, each with its first line's number."""
    csv.field_size_limit(MAX_LINE_BYTES)
    reader = csv.reader(
        _decoded(path, stream),
        delimiter=DELIMITERS[kind.format],
        quoting=csv.QUOTE_MINIMAL if has_quotes else csv.QUOTE_NONE,
        strict=True,
    )
    end = 0
    while True:
        begin = end + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            hint = "; --no-quotes reads quotes as ordinary characters" if has_quotes else ""
            raise InvalidInputError(
                f"{path}, line {begin}: {error} (fields are quoted as RFC 4180 has it{hint})"
            ) from error
        if cells is None:
            return
        end = reader.line_num
        if cells:
            yield begin, cells


def _decoded(path: Path, stream: Any) -> Iterator[str]:
    """Yield lines of text; bytes that are not UTF-8 become lone surrogates, which no task takes."""
    for number, line in enumerate(bounded_lines(stream), start=1):
        if line is None:
            raise InvalidInputError(f"{path}, line {number} has more than {MAX_LINE_BYTES} bytes")
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        yield line.decode("utf-8", errors="surrogateescape")


def _header(path: Path, rows: Iterator[tuple[int, list[str]]]) -> list[str]:
    _, names = next(rows, (0, []))
    if not names:
        raise InvalidInputError(f"{path} is empty; its first line must name the columns")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidInputError(f"{path} has several columns {twice[0]!r}; rename all but one")
    return names


def _from_cells(place: str, names: Sequence[str], cells: Sequence[str]) -> Record:
    values = dict(zip(names, cells, strict=False))
    error = None
    if len(cells) != len(names):
        error = MalformedRequestError(
            f"{place} has {len(cells)} fields; the header has {len(names)}"
        )
    num_bytes = sum(map(len, cells))
    return Record(place=place, values=values, num_bytes=num_bytes, is_text=True, error=error)


def _from_json(place: str, line: bytes | None) -> Record:
    if line is None:
        error: AlbertServeError = BodyTooLargeError(
            f"{place} has more than {MAX_LINE_BYTES} bytes; make several rows of it"
        )
        return Record(place=place, error=error)
    try:
        values = json.loads(line, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError) as error_of_json:
        error = MalformedRequestError(f"{place} is not JSON: {error_of_json}")
        return Record(place=place, num_bytes=len(line), error=error)
    if not isinstance(values, dict):
        error = MalformedRequestError(f"{place} is not a JSON object")
        return Record(place=place, num_bytes=len(line), error=error)
    return Record(place=place, values=values, num_bytes=len(line))


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is out of the range of numbers")
    return number
