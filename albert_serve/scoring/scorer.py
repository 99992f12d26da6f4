"""A scorer for Ray Data, Spark and other engines that call a function with batches.

ds.map_batches(
    AlbertScorer,
    fn_constructor_kwargs={"bundle": "/models/albert-small-en", "task": "text-classification"},
    batch_format="pyarrow",
)
"""

from __future__ import annotations

import functools
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import pyarrow as pa

from albert_serve.bundle.store import locate
from albert_serve.errors import AlbertServeError
from albert_serve.scoring.dataset import score_dataset, table_layout
from albert_serve.scoring.local import LocalScorer
from albert_serve.scoring.options import ScoreOptions
from albert_serve.scoring.rows import RowReader
from albert_serve.settings import BUNDLE_VARIABLE, MODELS_VARIABLE, Device, Settings

# Threads that need the same engine wait until one of them has opened it.
_LOCK: Final = threading.Lock()


class AlbertScorer:
    """A function that answers the rows of a batch.

    It can be pickled, because it contains only its configuration. Each process opens the engine at
    its first batch. The processes of a machine share the weights.

    Args:
        bundle: folder of the model on every machine, or `bentoml:` and a tag.
        task: name of the task, such as "text-classification".
        parameters: task parameters for every row (default: the task's defaults).
        columns: input column of each field of the task (default: the column with the field's name).
        keep: input columns to keep in the output (default: all).
        errors: "keep" to keep failed rows with their errors, or "fail" to raise the error.
        num_threads: number of engine threads, which should equal the CPUs reserved per worker.
        device: device to run on.

    Raises:
        NotFoundError: the task is unknown.
        InvalidInputError: a parameter is invalid, or the task has no such field.
    """

    def __init__(
        self,
        bundle: str | Path,
        task: str,
        *,
        parameters: Mapping[str, Any] | None = None,
        columns: Mapping[str, str] | None = None,
        keep: Sequence[str] | None = None,
        errors: Literal["keep", "fail"] = "keep",
        num_threads: int = 1,
        device: Device = "cpu",
    ) -> None:
        self._options = ScoreOptions(
            parameters=parameters or {}, columns=columns or {}, keep=keep, errors=errors
        )
        self._bundle = str(bundle)
        self._task = task
        self._num_threads = num_threads
        self._device: Device = device
        # Invalid options fail here, not in a worker.
        RowReader(task, self._options, in_table=True)

    def schema(self, input_schema: Any) -> Any:
        """Return the pyarrow schema of the output.

        Args:
            input_schema: pyarrow schema of the batches.
        """
        return table_layout(self._task, input_schema, self._options).schema

    def __call__(self, batch: Any) -> Any:
        """Return a batch of the same kind with the columns of the answer, as in Parquet output.

        Args:
            batch: pyarrow table or record batch, pandas DataFrame, or numpy arrays by column, each
                with one value per row.
        """
        if isinstance(batch, pa.Table):
            return self._score(batch)
        if isinstance(batch, pa.RecordBatch):
            scored = self._score(pa.Table.from_batches([batch])).combine_chunks()
            arrays = [column.combine_chunks() for column in scored.columns]
            return pa.RecordBatch.from_arrays(arrays, schema=scored.schema)
        if isinstance(batch, Mapping):
            scored = self._score(pa.table(dict(batch)))
            return {
                name: scored.column(name).to_numpy(zero_copy_only=False)
                for name in scored.column_names
            }
        return self._score(pa.Table.from_pandas(batch, preserve_index=False)).to_pandas()

    def map(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches with their answers, for Spark's `mapInArrow` and `mapInPandas`."""
        return map(self, batches)

    def _score(self, table: Any) -> Any:
        with _LOCK:
            scorer = _open(self._bundle, self._task, self._num_threads, self._device)
        return score_dataset(table, scorer, self._options).read_all()


@functools.cache
def _open(bundle: str, task: str, num_threads: int, device: Device) -> LocalScorer:
    """Open the engine of this process."""
    variables = {
        BUNDLE_VARIABLE: bundle,
        MODELS_VARIABLE: "",
        "ALBERT_SERVE_THREADS": str(num_threads),
        "ALBERT_SERVE_DEVICE": device,
    }
    try:
        options = Settings.from_environment(variables).job_runtime
        return LocalScorer.open(locate(Path(bundle)), task, options)
    except AlbertServeError as error:
        raise type(error)(f"on {socket.gethostname()}: {error}") from error
