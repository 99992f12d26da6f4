"""Batch scoring: every row of the input with its answer, part by part, in order."""

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

# The rows by which the columns of JSONL are known, where the output is a table.
_FIRST_ROWS: Final = 1024
_STDOUT: Final = "/dev/stdout"


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
        scorer: answers the requests of a task.
        inputs: files, globs and folders; `-` is the standard input.
        output: a file, which is replaced when it is complete; a folder, which holds the parts; or
            `-`, a pipe or a device, which is written to at once.
        is_stopped: asked after each part whether to stop.

    Raises:
        InvalidInputError: a parameter or an option is wrong, or the input is damaged or has not
            the columns that are read.
        JobError: the job ended early; the subclass says why. If its input and output are regular
            files, the same call goes on.
        OSError: the input cannot be opened.
    """
    options = options or ScoreOptions()
    check_local(output)
    target = output_path(output)
    _check_links(target)
    is_folder = str(output).endswith(os.sep) or target.is_dir()
    sources = _open_sources(inputs, target, options)
    if is_folder:
        form = sources[0].type.format
        kind = TableType(format=options.output_format or ("parquet" if form == "arrow" else form))
    else:
        kind = type_by_name(target.name, options.output_format)
        if kind.format == "arrow":
            raise InvalidInputError(f"{target}: Arrow is read only; name the output .parquet")
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
    """Return the path of an output; `-` is the standard output."""
    return Path(_STDOUT if str(output) == "-" else output)


def _check_links(target: Path) -> None:
    """Refuse a path whose symbolic links lead to themselves; one to a missing file is followed."""
    try:
        target.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise InvalidInputError(
                f"{target} is a symbolic link that leads to itself; name another output"
            ) from error


def is_stdout(path: Path) -> bool:
    """Whether a path is where the standard output goes, such as /dev/stdout."""
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
            raise InvalidInputError(f"{target} is also the input; name another output")
    if count > len(files):
        raise InvalidInputError(f"{len(files)} input files cannot be {count} shards")
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
        """Whether the input can be read again."""
        return not any(is_stream(source.path) for source in self.sources)

    def write_stream(self, target: Path) -> ScoreSummary:
        """Write a pipe or a device as the answers come."""
        with writing(target), _open_stream(target) as stream:
            layout, batches = self._begin()
            with (
                open_writer(stream, layout, has_header=True) as write,
                closing(self._parts(batches)) as parts,
            ):
                for part in parts:
                    write(part)
                    self._check_stopped("")
        return self._so_far()

    def write_parts(self, target: Path, *, is_folder: bool) -> ScoreSummary:
        """Write parts, and join them into a file."""
        resolved = target.resolve()
        with PartFolder.open(
            resolved if is_folder else resolved.with_name(f"{resolved.name}.parts"),
            self.kind.suffix,
            self._description(),
            # A pipe cannot be read again.
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
                    self._check_stopped("; the same command goes on" if self.is_resumable else "")
            if not parts.counts:  # so that an empty table has its columns
                write(ScoredPart())
            if is_folder:
                parts.finish()
            else:
                parts.join(resolved, lambda stream: join(parts.files, stream, layout))
        return self._so_far()

    def _begin(self) -> tuple[Layout, Iterator[RowBatch]]:
        """Return the output's layout, and the rows that are left to answer."""
        num_skipped = self.summary.num_resumed_rows
        batches = self._batches(num_skipped)
        first: list[RowBatch] = []
        if self.kind.has_columns and all(source.columns is None for source in self.sources):
            # The first of all rows, whatever has been answered before.
            first = _first_rows(self._batches(0) if num_skipped else batches)
            batches = batches if num_skipped else chain(first, batches)
        layout = make_layout(self.kind, self.reader, self.sources, first)
        return layout, map(layout.prepare, batches)

    def _batches(self, num_skipped: int) -> Iterator[RowBatch]:
        return read_batches(self.sources, self.reader.selection, num_skipped)

    def _parts(self, batches: Iterator[RowBatch]) -> Generator[ScoredPart, None, None]:
        """Yield the parts, answered; count them, and show the progress."""
        summary, title = self.summary, self.scorer.task
        num_bytes = sum(source.num_bytes for source in self.sources) if self.is_resumable else 0
        shown: dict[str, Any] = {"unit": "rows"}
        if num_bytes:
            shown = {"total": num_bytes, "unit": "B", "unit_scale": True}
        with progress_bar(title=title, **shown) as bar:
            for part in answer_batches(self.scorer, self.reader, batches, self.options, summary):
                yield part
                pa.default_memory_pool().release_unused()
                summary.num_parts += 1
                summary.num_run_tokens += part.counts.num_tokens
                self._advance(bar, part)

    def _so_far(self) -> ScoreSummary:
        """Return the summary of the rows so far."""
        self.summary.duration_s = time.monotonic() - self.started_s
        return self.summary

    def _advance(self, bar: tqdm[Any], part: ScoredPart) -> None:
        summary, position = self._so_far(), part.batch.position
        if not bar.n and summary.num_resumed_rows:
            # The rate is that of this run.
            bar.initial = bar.n = position * summary.num_resumed_rows // summary.num_rows
        speed = f"{summary.num_rows} rows, {summary.rows_per_s:.1f} rows/s"
        speed += f", {summary.tokens_per_s:.0f} tokens/s"
        bar.set_postfix_str(speed, refresh=False)
        bar.update(position - bar.n if bar.total else part.counts.num_rows)

    def _check_stopped(self, advice: str) -> None:
        if self.is_stopped():
            raise StoppedError(f"stopped after {self.summary.num_rows} rows{advice}")

    def _description(self) -> dict[str, Any]:
        """Return the settings that the rows of the output depend on."""
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
    described = {
        "format": source.type.suffix,
        "folders": {name: value.as_py() for name, value in source.partition.items()},
    }
    if source.version is None:
        return described
    return {**described, "size": source.num_bytes, "sha256": sha256_of(source.path)}


@contextmanager
def _open_stream(target: Path) -> Iterator[BinaryIO]:
    """Open a pipe or a device."""
    if is_stdout(target):
        sys.stdout.flush()
        # With its own position: opening the path again would begin at the file's start.
        stream: BinaryIO = open(os.dup(1), "wb")  # noqa: SIM115  # closed below
    else:
        stream = target.open("wb")
    try:
        yield stream
    except BaseException:
        # To close it is to write what is left, which fails again.
        with suppress(OSError):
            stream.close()
        raise
    stream.close()
