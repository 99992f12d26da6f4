"""Batch scoring: every row of the input with its answer, part by part, in order.

A part is a run of rows whose answers are computed and written together. What a part holds depends
on the input alone, so that a job that was killed and started again writes the same bytes.
"""

from __future__ import annotations

import os
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, Final

from tqdm import tqdm

from albert_serve import __version__
from albert_serve.errors import InvalidInputError
from albert_serve.files import sha256_of
from albert_serve.progress import progress_bar
from albert_serve.scoring.answering import Answering, Counts, Part
from albert_serve.scoring.distributed.ahead import answering_for
from albert_serve.scoring.errors import OutputError, StoppedError
from albert_serve.scoring.formats import (
    STDOUT,
    FileType,
    is_stdout,
    is_stream,
    release_arrow_memory,
    type_by_name,
)
from albert_serve.scoring.inputs import find_inputs
from albert_serve.scoring.local import Scorer, check_head
from albert_serve.scoring.memo import Memo
from albert_serve.scoring.options import ScoreOptions, ScoreSummary
from albert_serve.scoring.output.layout import Layout, make_layout
from albert_serve.scoring.output.parts import PartFolder, writing
from albert_serve.scoring.output.writers import join, open_writer
from albert_serve.scoring.rows import RowReader
from albert_serve.scoring.sources import Reader, Record, Source

# The rows by which the columns of JSONL are known, where the output is a table.
_FIRST_ROWS: Final = 1024
_BAR: Final = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"
_LINE: Final = "{desc}: {percentage:.0f}% in {elapsed}, {remaining} left{postfix}"


def score_files(
    scorer: Scorer[Any],
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
        OSError: the input cannot be read.
    """
    options = options or ScoreOptions()
    target = Path(STDOUT if str(output) == "-" else output)
    sources = _open_sources(inputs, target, options)
    kind = _output_type(output, target, sources, options)
    rows = RowReader(
        scorer.task, options.parameters, options.columns, options.keep, in_table=kind.is_table
    )
    check_head(scorer, rows.parameters)
    for source in sources:
        if source.columns is not None:
            rows.check(str(source.path), source.columns)
    job = _Job(
        scorer=scorer,
        sources=sources,
        kind=kind,
        rows=rows,
        options=options,
        is_stopped=is_stopped,
    )
    if is_stream(target) or is_stdout(target):
        return job.write_stream(target)
    return job.write_parts(target, is_folder=_is_folder(output, target))


def _open_sources(
    inputs: Sequence[str | Path], target: Path, options: ScoreOptions
) -> list[Source]:
    index, count = options.shard
    files = find_inputs(inputs, target)
    for file in files:
        if target.is_file() and target.samefile(file):
            raise InvalidInputError(f"{target} is also the input; name another output")
    if count > len(files):
        raise InvalidInputError(f"{len(files)} input files cannot be {count} shards")
    return [
        Source.open(file, options.input_format, has_quotes=options.has_quotes)
        for file in files[index::count]
    ]


def _is_folder(output: str | Path, target: Path) -> bool:
    return str(output).endswith(os.sep) or target.is_dir()


def _output_type(
    output: str | Path, target: Path, sources: Sequence[Source], options: ScoreOptions
) -> FileType:
    if _is_folder(output, target):
        return FileType(format=options.output_format or sources[0].type.format)
    return type_by_name(target.name, options.output_format)


@dataclass(kw_only=True)
class _Job:
    """One run of a job.

    Attributes:
        total: the counts of all rows so far, those of earlier runs among them.
        goes_on: whether a later run goes on where this one ends.
    """

    scorer: Scorer[Any]
    sources: Sequence[Source]
    kind: FileType
    rows: RowReader
    options: ScoreOptions
    is_stopped: Callable[[], bool]
    total: Counts = field(default_factory=Counts)
    num_resumed_rows: int = 0
    num_run_tokens: int = 0
    num_parts: int = 0
    goes_on: bool = False
    started_s: float = field(default_factory=time.monotonic)

    @property
    def _answering(self) -> Answering:
        return answering_for(self.scorer, self.rows, self.options)

    @property
    def is_resumable(self) -> bool:
        """Whether the input can be read again."""
        return not any(is_stream(source.path) for source in self.sources)

    def write_stream(self, target: Path) -> ScoreSummary:
        """Write a pipe or a device as the answers come."""
        with (
            _open_stream(target) as stream,
            self._progress() as (reader, bar),
            _memo(None, 0) as memo,
        ):
            layout, records = self._begin(reader)
            with open_writer(stream, layout, has_header=True, ending=writing(target)) as writer:
                for part in self._answering.parts(records, memo, total=self.total):
                    with writing(target):
                        writer.write(part.rows, part.answered)
                    self._advance(part, reader, bar)
        return self._summary()

    def write_parts(self, target: Path, *, is_folder: bool) -> ScoreSummary:
        """Write parts, and join them into a file."""
        self.goes_on = self.is_resumable
        resolved = target.resolve()
        folder = resolved if is_folder else resolved.with_name(f"{resolved.name}.parts")
        with PartFolder.open(
            folder,
            self._description(),
            # What came through a pipe cannot be read again.
            restart=self.options.restart or not self.is_resumable,
            is_kept=self.is_resumable,
            is_temporary=not is_folder,
        ) as parts:
            self._resume(parts)
            with self._progress() as (reader, bar), self._memo(parts) as memo:
                layout, records = self._begin(reader)
                for part in self._answering.parts(
                    records, memo, total=self.total, num_before=self.num_parts
                ):
                    self._write(parts, layout, part, is_folder=is_folder)
                    self._advance(part, reader, bar)
            if not parts.entries:  # so that an empty table has its columns
                self._write(parts, layout, Part(), is_folder=is_folder)
            if is_folder:
                parts.finish()
            else:
                parts.join(resolved, lambda stream: join(parts.files, stream, layout))
        return self._summary()

    def _write(self, parts: PartFolder, layout: Layout, part: Part, *, is_folder: bool) -> None:
        has_header = is_folder or not parts.entries

        def content(stream: BinaryIO) -> None:
            with open_writer(stream, layout, has_header=has_header) as writer:
                writer.write(part.rows, part.answered)

        parts.write(self.kind.suffix, asdict(part.counts()), content)

    def _resume(self, parts: PartFolder) -> None:
        for entry in parts.entries:
            self.total.add(Counts(**entry.counts))
        self.num_parts = len(parts.entries)
        self.num_resumed_rows = self.total.num_rows
        self._answering.check_errors(self.total, Counts())

    def _begin(self, reader: Reader) -> tuple[Layout, Iterator[Record]]:
        """Return the output's layout, and the records that are left to answer."""
        records = reader.read(self.num_resumed_rows)
        first: list[Record] = []
        if self.kind.is_table and any(source.columns is None for source in self.sources):
            # The first of all rows, whatever has been answered before.
            start = self._reader().read() if self.num_resumed_rows else records
            first = list(islice(start, _FIRST_ROWS))
            records = records if self.num_resumed_rows else chain(first, records)
        layout = make_layout(self.kind, self.rows, self.sources, self.options.keep, first)
        return layout, records

    def _memo(self, parts: PartFolder) -> AbstractContextManager[Memo]:
        return _memo(parts.memo_file if self.options.dedupe else None, self.num_parts)

    def _reader(self) -> Reader:
        return Reader(self.sources, self.rows.fields, self.options.keep)

    @contextmanager
    def _progress(self) -> Iterator[tuple[Reader, tqdm[Any]]]:
        reader = self._reader()
        total = sum(source.num_bytes for source in self.sources) if self.is_resumable else None
        if not total:
            with progress_bar(title=self.scorer.task, unit="rows") as bar:
                yield reader, bar
            return
        with progress_bar(
            title=self.scorer.task, total=total, unit="B", bar_format=_BAR, line_format=_LINE
        ) as bar:
            yield reader, bar

    def _advance(self, part: Part, reader: Reader, bar: tqdm[Any]) -> None:
        release_arrow_memory()
        counts = part.counts()
        num_rows = self.total.num_rows
        num_bytes = reader.num_bytes * num_rows // (num_rows + part.num_later_rows)
        if not bar.n and self.num_resumed_rows:
            # The rate is that of this run.
            share = counts.num_rows / (counts.num_rows + self.num_resumed_rows)
            bar.initial = bar.n = int(num_bytes * (1 - share))
        self.num_parts += 1
        self.num_run_tokens += counts.num_tokens
        duration_s = max(time.monotonic() - self.started_s, 1e-9)
        rate = (self.total.num_rows - self.num_resumed_rows) / duration_s
        speed = f"{self.total.num_rows} rows, {rate:.1f} rows/s"
        if self.num_run_tokens:
            speed += f", {self.num_run_tokens / duration_s:.0f} tokens/s"
        bar.set_postfix_str(speed, refresh=False)
        bar.update(num_bytes - bar.n if bar.total else counts.num_rows)
        if self.is_stopped():
            advice = "; the same command goes on" if self.goes_on else ""
            raise StoppedError(f"stopped after {self.total.num_rows} rows{advice}")

    def _summary(self) -> ScoreSummary:
        return ScoreSummary(
            counts=self.total,
            num_resumed_rows=self.num_resumed_rows,
            num_run_tokens=self.num_run_tokens,
            num_parts=self.num_parts,
            duration_s=time.monotonic() - self.started_s,
        )

    def _description(self) -> dict[str, Any]:
        """Return what the bytes of the output depend on."""
        return {
            "version": __version__,
            "task": self.scorer.task,
            "model": self.scorer.identity,
            "parameters": self.rows.parameters,
            "columns": dict(self.options.columns),
            "keep": self.options.keep,
            "output format": self.kind.suffix,
            "part_rows": self.options.part_rows,
            "dedupe": self.options.dedupe,
            "quotes": self.options.has_quotes,
            "inputs": [self._input(source) for source in self.sources],
        }

    def _input(self, source: Source) -> dict[str, Any]:
        if is_stream(source.path):
            return {"format": source.type.suffix}
        return {
            "format": source.type.suffix,
            "size": source.num_bytes,
            "sha256": sha256_of(source.path),
        }


@contextmanager
def _memo(file: Path | None, num_parts: int) -> Iterator[Memo]:
    """Open the answers by request.

    Raises:
        OutputError: within the block, they could not be stored.
    """
    try:
        with Memo(file, num_parts) as memo:
            yield memo
    except sqlite3.Error as error:
        raise OutputError(f"{file or 'a temporary file'} cannot be written: {error}") from error


@contextmanager
def _open_stream(target: Path) -> Iterator[BinaryIO]:
    """Open a pipe or a device.

    Raises:
        OutputError: it cannot be opened; or, at the end, written to.
    """
    with writing(target):
        stream = _opened_stream(target)
    try:
        yield stream
    except BaseException:
        # To close it is to write what is left, which fails again.
        with suppress(OSError):
            stream.close()
        raise
    with writing(target):
        stream.close()


def _opened_stream(target: Path) -> BinaryIO:
    if is_stdout(target):
        sys.stdout.flush()
        # With its own position: opening the path again would begin at the file's start.
        return open(os.dup(1), "wb")
    return target.open("wb")
