"""Batch scoring: write every row of the input with its answer, in parts and in order."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Final

import pyarrow as pa
from tqdm import tqdm

from albert_serve import __version__
from albert_serve.errors import InvalidInputError
from albert_serve.files import sha256_of
from albert_serve.progress import progress_bar
from albert_serve.scoring.answering import ScoredPart, Scorer, answer_batches, check_head
from albert_serve.scoring.errors import StoppedError, writing
from albert_serve.scoring.inputs import InputFile, RowBatch, read_batches
from albert_serve.scoring.options import Counts, ScoreOptions, ScoreSummary
from albert_serve.scoring.output import Layout, join, make_layout, open_writer
from albert_serve.scoring.parts import PartFolder
from albert_serve.scoring.paths import check_local, find_inputs, partition_columns
from albert_serve.scoring.rows import RowReader
from albert_serve.tables.formats import TableType, is_stream, type_by_name

# Number of JSONL rows that determine the columns of a table.
_FIRST_ROWS: Final = 1024
_STDOUT: Final = "/dev/stdout"
_RESUME: Final = " Repeat the command to resume."


def score_files(
    scorer: Scorer,
    inputs: Sequence[str | Path],
    output: str | Path,
    options: ScoreOptions | None = None,
    *,
    is_stopped: Callable[[], bool] = lambda: False,
) -> ScoreSummary:
    """Write every row of the input with its answer.

    Args:
        scorer: scorer of the task.
        inputs: files, globs and folders, or `-` for standard input.
        output: file, which is replaced when the job is complete, or folder, which contains the
            parts. A pipe, a device or `-` is written immediately.
        options: options of the job (default: `ScoreOptions()`).
        is_stopped: function that is called after each part. If it returns true, the job stops.

    Returns:
        The counts of the rows, and the throughput.

    Raises:
        InvalidInputError: a parameter or option is invalid, or the input is damaged or lacks a
            column that is read.
        JobError: the job ended early, for the reason that the subclass names. If input and output
            are regular files, the same call resumes the job.
        OSError: an input file cannot be opened.
    """
    options = options or ScoreOptions()
    check_local(output)
    target = output_path(output)
    _check_links(target)
    is_folder = str(output).endswith(os.sep) or target.is_dir()
    sources = _open_sources(inputs, target, options)
    if is_folder:
        input_format = sources[0].type.format
        default = "parquet" if input_format == "arrow" else input_format
        kind = TableType(format=options.output_format or default)
    else:
        kind = type_by_name(target.name, options.output_format)
        if kind.format == "arrow":
            raise InvalidInputError(f"{target} is an Arrow file, which is only an input format.")
    reader = RowReader(scorer.task, options, in_table=kind.has_columns)
    check_head(scorer, reader.parameters)
    for source in sources:
        if source.columns is not None:
            reader.check(str(source.path), source.columns)
    parameters = {"truncation": options.truncation, **reader.parameters}
    summary = ScoreSummary(text_length=scorer.text_length(parameters))
    job = _Job(
        scorer=scorer,
        sources=sources,
        kind=kind,
        reader=reader,
        options=options,
        is_stopped=is_stopped,
        summary=summary,
    )
    if is_stream(target) or is_stdout(target):
        return job.write_stream(target)
    return job.write_parts(target, is_folder=is_folder)


def output_path(output: str | Path) -> Path:
    """Return the path of an output, which is standard output for `-`."""
    return Path(_STDOUT if str(output) == "-" else output)


def _check_links(target: Path) -> None:
    """Reject a symbolic link that leads to itself. A link to a missing file is valid."""
    try:
        target.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise InvalidInputError(
                f"{target} is a symbolic link that leads to itself. Choose another output."
            ) from error


def is_stdout(path: Path) -> bool:
    """Return whether a path is the file that standard output writes to, such as /dev/stdout."""
    try:
        return os.path.samestat(os.fstat(1), path.stat())
    except OSError:
        return False


def _open_sources(
    inputs: Sequence[str | Path], target: Path, options: ScoreOptions
) -> list[InputFile]:
    index, count = options.shard
    files = find_inputs(inputs, target)
    partitions = partition_columns(files)
    for file, _ in files:
        if target.is_file() and target.samefile(file):
            raise InvalidInputError(f"{target} is also an input. Choose another output.")
    if count > len(files):
        raise InvalidInputError(f"{len(files)} input files cannot be split into {count} shards.")
    return [
        InputFile.open(
            file,
            options.input_format,
            has_quotes=options.has_quotes,
            delimiter=options.delimiter,
            partition=partition,
        )
        for (file, _), partition in list(zip(files, partitions, strict=True))[index::count]
    ]


@dataclass(kw_only=True)
class _Job:
    """One run of a job."""

    scorer: Scorer
    sources: Sequence[InputFile]
    kind: TableType
    reader: RowReader
    options: ScoreOptions
    is_stopped: Callable[[], bool]
    summary: ScoreSummary
    started_s: float = field(default_factory=time.monotonic)

    @property
    def is_resumable(self) -> bool:
        """Whether all input can be read again, which excludes pipes."""
        return not any(is_stream(source.path) for source in self.sources)

    def write_stream(self, target: Path) -> ScoreSummary:
        """Write answers to a pipe or a device immediately."""
        with writing(target), _open_stream(target) as stream:
            layout, batches = self._begin()
            with (
                open_writer(stream, layout, has_header=True) as write,
                closing(self._parts(batches)) as parts,
            ):
                for part in parts:
                    write(part)
                    self._check_stopped("")
        return self._current_summary()

    def write_parts(self, target: Path, *, is_folder: bool) -> ScoreSummary:
        """Write parts, and join them unless the output is a folder."""
        resolved = target.resolve()
        with PartFolder.open(
            resolved if is_folder else resolved.with_name(f"{resolved.name}.parts"),
            self.kind.suffix,
            self._description(),
            # Old parts are useless if the input is a pipe, which cannot be read again.
            restart=self.options.restart or not self.is_resumable,
            is_temporary=not is_folder,
        ) as parts:
            for counts in parts.counts:
                self.summary.add(Counts(**counts))
            self.summary.num_parts = len(parts.counts)
            self.summary.num_resumed_rows = self.summary.num_rows
            layout, batches = self._begin()

            def write(part: ScoredPart) -> None:
                has_header = is_folder or not parts.counts
                parts.write(asdict(part.counts), partial(_write_part, layout, part, has_header))

            with closing(self._parts(batches)) as answered:
                for part in answered:
                    write(part)
                    self._check_stopped(_RESUME if self.is_resumable else "")
            if not parts.counts:  # so that an empty table has columns
                write(ScoredPart())
            if is_folder:
                parts.finish()
            else:
                parts.join(resolved, lambda stream: join(parts.files, stream, layout))
        return self._current_summary()

    def _begin(self) -> tuple[Layout, Iterator[RowBatch]]:
        """Return the output's layout, and an iterator over the remaining rows."""
        num_skipped = self.summary.num_resumed_rows
        batches = self._batches(num_skipped)
        first: list[RowBatch] = []
        if self.kind.has_columns and all(source.columns is None for source in self.sources):
            # The layout depends on the first rows of the input, also after a resume.
            first = _first_rows(self._batches(0) if num_skipped else batches)
            batches = batches if num_skipped else chain(first, batches)
        layout = make_layout(self.kind, self.reader, self.sources, first)
        return layout, map(layout.prepare, batches)

    def _batches(self, num_skipped: int) -> Iterator[RowBatch]:
        return read_batches(self.sources, self.reader.selection, num_skipped)

    def _parts(self, batches: Iterator[RowBatch]) -> Generator[ScoredPart, None, None]:
        """Yield the answered parts, count them, and show the progress."""
        summary, title = self.summary, self.scorer.task
        num_bytes = sum(source.num_bytes for source in self.sources) if self.is_resumable else 0
        scale: dict[str, Any] = {"unit": "rows"}
        if num_bytes:
            scale = {"total": num_bytes, "unit": "B", "unit_scale": True}
        with progress_bar(title=title, **scale) as bar:
            for part in answer_batches(self.scorer, self.reader, batches, self.options, summary):
                yield part
                pa.default_memory_pool().release_unused()
                summary.num_parts += 1
                summary.num_run_tokens += part.counts.num_tokens
                self._advance(bar, part)

    def _current_summary(self) -> ScoreSummary:
        """Return the summary with the current duration."""
        self.summary.duration_s = time.monotonic() - self.started_s
        return self.summary

    def _advance(self, bar: tqdm[Any], part: ScoredPart) -> None:
        summary, position = self._current_summary(), part.batch.position
        if not bar.n and summary.num_resumed_rows:
            # The bar excludes its initial value from the throughput.
            bar.initial = bar.n = position * summary.num_resumed_rows // summary.num_rows
        speed = f"{summary.num_rows} rows, {summary.rows_per_s:.1f} rows/s"
        speed += f", {summary.tokens_per_s:.0f} tokens/s"
        bar.set_postfix_str(speed, refresh=False)
        bar.update(position - bar.n if bar.total else part.counts.num_rows)

    def _check_stopped(self, remedy: str) -> None:
        if self.is_stopped():
            raise StoppedError(f"Stopped after {self.summary.num_rows} rows.{remedy}")

    def _description(self) -> dict[str, Any]:
        """Return everything that determines the rows of the output."""
        return {
            "version": __version__,
            "task": self.scorer.task,
            "model": self.scorer.identity,
            "parameters": dict(self.options.parameters),
            "truncation": self.options.truncation,
            "columns": dict(self.options.columns),
            "keep": self.options.keep,
            "output format": self.kind.suffix,
            "quotes": self.options.has_quotes,
            "delimiter": self.options.delimiter,
            "inputs": [_input(source) for source in self.sources],
        }


def _first_rows(batches: Iterator[RowBatch]) -> list[RowBatch]:
    first: list[RowBatch] = []
    num_rows = 0
    for batch in batches:
        first.append(batch)
        num_rows += len(batch.values)
        if num_rows >= _FIRST_ROWS:
            break
    return first


def _write_part(layout: Layout, part: ScoredPart, has_header: bool, stream: BinaryIO) -> None:
    with open_writer(stream, layout, has_header=has_header) as write:
        write(part)


def _input(source: InputFile) -> dict[str, Any]:
    description = {
        "format": source.type.suffix,
        "folders": {name: value.as_py() for name, value in source.partition.items()},
    }
    if source.version is None:
        return description
    return {**description, "size": source.num_bytes, "sha256": sha256_of(source.path)}


@contextmanager
def _open_stream(target: Path) -> Iterator[BinaryIO]:
    """Open a pipe or a device."""
    if is_stdout(target):
        sys.stdout.flush()
        # A duplicate keeps the position. Opening the path would start at the file's beginning.
        stream: BinaryIO = open(os.dup(1), "wb")  # noqa: SIM115  # closed below
    else:
        stream = target.open("wb")
    try:
        yield stream
    except BaseException:
        # Closing the stream writes the rest of its buffer, which would fail again.
        with suppress(OSError):
            stream.close()
        raise
    stream.close()
