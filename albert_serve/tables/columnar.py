"""Columnar files: Parquet, and the Arrow files that `datasets` saves."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, cast

from albert_serve.errors import InvalidInputError
from albert_serve.tables.formats import (
    TableType,
    damaged,
    first_line,
    import_pyarrow,
    is_stream,
)
from albert_serve.tables.rows import Row, check_names

_PURPOSE: Final = "Arrow"
# A column of Parquet is read in parts of this size, so that row groups may have any size.
_PARQUET_READ_BYTES: Final = 1 << 20
# Arrow files with random access begin with this, unlike the streams that `datasets` writes.
_FILE_MAGIC: Final = b"ARROW1"
# A folder that `datasets` saves contains these files next to the data.
_METADATA_FILES: Final = frozenset({"dataset_info.json", "dataset_dict.json", "state.json"})


def is_dataset_metadata(file: Path) -> bool:
    """Return whether a file in a folder that `datasets` saved is not data."""
    is_cache = file.suffix == ".arrow" and file.name.startswith(("cache-", "tmp"))
    return file.name in _METADATA_FILES or is_cache


def read_schema(path: Path, kind: TableType) -> tuple[Any, int]:
    """Return pyarrow's schema of a file, and its number of rows."""
    if is_stream(path):
        name = kind.format.title()
        raise InvalidInputError(f"{name} cannot be read from a pipe. Write {path} to a file.")
    if kind.format == "parquet":
        with _errors(path):
            metadata = _parquet(path).read_metadata(path)
            return metadata.schema.to_arrow_schema(), metadata.num_rows
    with _arrow_batches(path) as (schema, batches):
        return schema, sum(batch.num_rows for batch in batches)


def read_columns(
    path: Path,
    kind: TableType,
    columns: Sequence[str] | None = None,
    *,
    max_rows: int = 1024,
    max_bytes: int = 4 << 20,
    num_skipped: int = 0,
) -> Iterator[tuple[int, float, Any]]:
    """Yield pyarrow record batches of limited size, whatever the size of row groups.

    Each comes with the number of rows before it, and the fraction of the file up to its end.

    Args:
        columns: names of the columns to read, or None for all.
        max_rows: maximum number of rows in a batch.
        max_bytes: approximate maximum size of a batch.
        num_skipped: number of rows to skip.
    """
    if kind.format == "parquet":
        yield from _parquet_batches(path, columns, max_rows, max_bytes, num_skipped)
        return
    _, num_rows = read_schema(path, kind)
    number = 0
    with _arrow_batches(path) as (_, batches):
        for full_batch in batches:
            batch = full_batch if columns is None else full_batch.select(list(columns))
            step = max(1, min(max_rows, max_bytes * batch.num_rows // max(1, batch.nbytes)))
            for start in range(max(0, num_skipped - number), batch.num_rows, step):
                rows = batch.slice(start, step)
                yield number + start, (number + start + rows.num_rows) / num_rows, rows
            number += batch.num_rows


def read_rows(
    path: Path, kind: TableType, columns: Sequence[str] | None = None, *, prefix: str
) -> Iterator[Row]:
    """Yield the rows of a file.

    Args:
        columns: names of the columns to read, or None for all.
        prefix: text before the row number in locations.
    """
    schema, _ = read_schema(path, kind)
    check_names(path, schema.names)
    classes, size, header = class_names(schema), path.stat().st_size, f"{prefix}the schema"
    for start, fraction, batch in read_columns(path, kind, columns):
        for number, values in enumerate(plain_rows(batch), start=start + 1):
            location = f"{prefix}row {number}"
            yield Row(location, values, None, header, classes, round(fraction * size))


def plain_rows(batch: Any) -> list[dict[str, Any]]:
    """Return the rows of a pyarrow record batch as Python values.

    Python has no times in nanoseconds, so their columns become text with nine decimals, such as
    1970-01-01T00:00:00.000001000.
    """
    pa = import_pyarrow("pyarrow", _PURPOSE)
    for index, (name, column) in enumerate(zip(batch.schema.names, batch.columns, strict=True)):
        if pa.types.is_temporal(column.type) and getattr(column.type, "unit", "") == "ns":
            batch = batch.set_column(index, name, _time_texts(column))
    try:
        rows: list[dict[str, Any]] = batch.to_pylist()
    except ValueError as error:  # such as a UnicodeDecodeError
        raise InvalidInputError(
            f"A value in the columns {', '.join(batch.schema.names)} cannot be read "
            f"({first_line(error)}). Check that the file is complete."
        ) from error
    return rows


def _time_texts(column: Any) -> Any:
    pa = import_pyarrow("pyarrow", _PURPOSE)
    if pa.types.is_duration(column.type):  # durations keep pyarrow's format
        return column
    pc = import_pyarrow("pyarrow.compute", _PURPOSE)
    text = pc.replace_substring(column.cast(pa.string()), " ", "T")
    # Arrow writes +0100 for +01:00.
    return pc.replace_substring_regex(text, r"([+-]\d\d)(\d\d)$", r"\1:\2")


def _parquet_batches(
    path: Path, columns: Sequence[str] | None, max_rows: int, max_bytes: int, num_skipped: int
) -> Iterator[tuple[int, float, Any]]:
    with (
        _errors(path),
        _parquet(path).ParquetFile(
            path,
            pre_buffer=False,
            buffer_size=_PARQUET_READ_BYTES,
            page_checksum_verification=True,  # if the file has checksums
        ) as file,
    ):
        number = 0
        for group in range(file.num_row_groups):
            metadata = file.metadata.row_group(group)
            if number + metadata.num_rows <= num_skipped:
                number += metadata.num_rows
                continue
            num_fitting = max_bytes * metadata.num_rows // max(1, metadata.total_byte_size)
            for batch in file.iter_batches(
                min(max(1, num_fitting), max_rows),
                row_groups=[group],
                columns=columns,
                # Each of Arrow's threads would keep memory that other threads have freed.
                use_threads=False,
            ):
                start = max(0, num_skipped - number)
                end = number + batch.num_rows
                if start < batch.num_rows:
                    yield number + start, end / file.metadata.num_rows, batch.slice(start)
                number = end


def _parquet(path: Path) -> Any:
    return import_pyarrow("pyarrow.parquet", f"{path} is Parquet, which")


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    """Convert pyarrow's errors about a file's content to InvalidInputErrors."""
    pa = import_pyarrow("pyarrow", str(path))
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            raise
        raise damaged(path, error) from error
    except pa.ArrowException as error:
        raise damaged(path, error) from error


@contextmanager
def _arrow_batches(path: Path) -> Iterator[tuple[Any, Iterator[Any]]]:
    pa = import_pyarrow("pyarrow", _PURPOSE)
    ipc = import_pyarrow("pyarrow.ipc", _PURPOSE)
    with _errors(path), pa.memory_map(str(path)) as source:
        is_file = source.read(len(_FILE_MAGIC)) == _FILE_MAGIC
        source.seek(0)
        if is_file:
            file = cast("Any", ipc.open_file(source))
            yield file.schema, (file.get_batch(i) for i in range(file.num_record_batches))
        else:
            stream = cast("Any", ipc.open_stream(source))
            yield stream.schema, iter(stream)


def class_names(schema: Any) -> dict[str, list[str]]:
    """Return the names of the classes 0, 1, ... by column, if `datasets` wrote such names.

    Args:
        schema: pyarrow schema.
    """
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {name: names for name, feature in features.items() if (names := _names_of(feature))}
    except (KeyError, TypeError, AttributeError, ValueError):  # `datasets` did not write the file
        return {}


def _names_of(feature: Mapping[str, Any]) -> list[str]:
    """Return the names of a ClassLabel or a list of ClassLabels, or nothing for other features."""
    inner = feature.get("feature", feature)
    return list(map(str, inner["names"] or ())) if inner.get("_type") == "ClassLabel" else []
