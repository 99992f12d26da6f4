"""Tables in memory in place of data files.

Each table becomes a Parquet file in the cache folder until the process ends. The file is named by a
hash of its content, so that a resumed run recognises its data.
"""

from __future__ import annotations

import argparse
import atexit
import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyarrow import parquet

from albert_serve.files import write_atomically
from albert_serve.settings import cache_folder
from albert_serve.tables.formats import first_line
from training.errors import TrainingError

# The keys are the paths of the files, and the values are the names of the tables.
_NAMES: Final[dict[str, str]] = {}


def data_files(data: Any) -> tuple[Path, ...]:
    """Return the paths of data files, after writing tables in memory to files.

    Args:
        data: path, pandas or polars DataFrame, pyarrow table, `datasets.Dataset`, list of rows as
            dictionaries, dictionary of columns, or a list of any of these.

    Raises:
        argparse.ArgumentTypeError: the data has another type or no rows, or a column mixes types.
        OSError: a table cannot be written.
    """
    if isinstance(data, str | os.PathLike):
        return (Path(data),)
    if isinstance(data, Iterator):
        data = list(data)
    if hasattr(data, "collect"):  # a polars LazyFrame
        data = data.collect()
    if isinstance(data, list | tuple) and data and isinstance(data[0], tuple):
        raise argparse.ArgumentTypeError(
            'The rows must be dictionaries, such as {"text": "a fine film", "label": "good"}.'
        )
    if isinstance(data, list | tuple) and not (data and isinstance(data[0], Mapping)):
        return tuple(file for table in data for file in data_files(table))
    file = _write(_table(data))
    _NAMES[str(file)] = f"the {type(data).__name__}"
    return (file,)


def is_table(file: Path) -> bool:
    """Return whether a file contains a table from memory."""
    return str(file) in _NAMES


def identify(file: Path) -> str:
    """Return a file's path or, for a table in memory, the hash of its content."""
    return f"table {file.stem}" if is_table(file) else str(file)


@contextmanager
def naming_tables() -> Iterator[None]:
    """Name tables, not their files, in errors within `with` or in a decorated function."""
    try:
        yield
    except TrainingError as error:
        message = str(error)
        for file, name in _NAMES.items():
            message = message.replace(file, name)
        error.args = (message,)
        raise


def _table(data: Any) -> pa.Table:
    try:
        if hasattr(data, "__arrow_c_stream__"):
            table = _without_views(pa.table(data))
        elif isinstance(data, Mapping):
            table = pa.table(dict(data))
        else:
            rows = pa.array([dict(row) for row in data])
            table = pa.Table.from_batches([pa.RecordBatch.from_struct_array(rows)])
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(
            f"The {type(data).__name__} cannot be read as a table ({first_line(error)}). Use "
            "files, a DataFrame of pandas (2.2 or newer) or polars, a Dataset, or a list of "
            "dictionaries."
        ) from error
    if not table.num_rows:
        raise argparse.ArgumentTypeError(f"The {type(data).__name__} has no rows.")
    return table


def _without_views(table: pa.Table) -> pa.Table:
    """Return a table in which texts replace the categories of string views that polars makes."""
    for index, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type) and pa.types.is_string_view(field.type.value_type):
            texts = pa.array(table[index].to_pylist(), pa.string())
            table = table.set_column(index, field.name, texts)
    return table


def _write(table: pa.Table) -> Path:
    """Write a table to a file that is named by the hash of its content."""
    stream = pa.BufferOutputStream()
    # Metadata is omitted, because it may contain pandas' version, which would change the hash.
    parquet.write_table(table.replace_schema_metadata(None).combine_chunks(), stream)
    content = stream.getvalue().to_pybytes()
    folder = cache_folder()
    if folder is None:
        raise argparse.ArgumentTypeError(
            "There is no cache folder for tables. Set ALBERT_SERVE_CACHE."
        )
    file = folder / "tables" / f"{hashlib.sha256(content).hexdigest()[:16]}.parquet"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, content)
    atexit.register(file.unlink, missing_ok=True)
    return file
