"""Tables in memory in place of data files.

Each becomes a Parquet file in the cache folder, which is removed when the process ends. Its name is
a hash of its content, so that a run that is resumed knows its data again.
"""

from __future__ import annotations

import argparse
import atexit
import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from albert_serve.files import write_atomically
from albert_serve.settings import cache_folder
from albert_serve.tables.formats import first_line


def data_files(data: Any) -> tuple[Path, ...]:
    """Return the paths of data files; tables in memory are written to files.

    Args:
        data: a path; a frame of pandas or polars, a table of pyarrow, a `datasets.Dataset`, or a
            list of rows, which are dictionaries; or a list of these.

    Raises:
        argparse.ArgumentTypeError: it is none of these, or a table without rows, or whose columns
            mix types.
        OSError: a table cannot be written.
    """
    if isinstance(data, str | os.PathLike):
        return (Path(data),)
    if isinstance(data, Iterator):
        data = list(data)
    if isinstance(data, list | tuple) and not (data and isinstance(data[0], Mapping)):
        return tuple(file for table in data for file in data_files(table))
    return (_write(_table(data)),)


def _table(data: Any) -> pa.Table:
    try:
        if hasattr(data, "__arrow_c_stream__"):
            table = pa.table(data)
        else:
            rows = pa.array([dict(row) for row in data])
            table = pa.Table.from_batches([pa.RecordBatch.from_struct_array(rows)])
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(
            f"the {type(data).__name__} cannot be read as a table ({first_line(error)}); give "
            "files, a frame of pandas (2.2 or newer) or polars, a Dataset, or a list of "
            "dictionaries"
        ) from error
    if not table.num_rows:
        raise argparse.ArgumentTypeError(f"the {type(data).__name__} has no rows")
    return table


def _write(table: pa.Table) -> Path:
    """Write a table to the file of its name."""
    stream = pa.BufferOutputStream()
    # Metadata tells the version of pandas, say.
    parquet.write_table(table.replace_schema_metadata(None).combine_chunks(), stream)
    content = stream.getvalue().to_pybytes()
    folder = cache_folder()
    if folder is None:
        raise argparse.ArgumentTypeError(
            "there is no cache folder to write tables to; set ALBERT_SERVE_CACHE"
        )
    file = folder / "tables" / f"{hashlib.sha256(content).hexdigest()[:16]}.parquet"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, content)
    atexit.register(file.unlink, missing_ok=True)
    return file
