"""Batch scoring: every row of the input with its answer, part by part, in order."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, Final

import pyarrow as pa
from tqdm import tqdm

from albert_serve import __version__
from albert_serve.errors import InvalidInputError
from albert_serve.files import sha256_of
from albert_serve.progress import progress_bar
from albert_serve.scoring.answering import ScoredPart, Scorer, answer_records, check_head
from albert_serve.scoring.errors import StoppedError, writing
from albert_serve.scoring.inputs import find_inputs
from albert_serve.scoring.options import Counts, ScoreOptions, ScoreSummary
from albert_serve.scoring.output.layout import Layout, make_layout
from albert_serve.scoring.output.parts import PartFolder
from albert_serve.scoring.output.writers import join, open_writer
from albert_serve.scoring.records import InputFile, Record, read_records
from albert_serve.scoring.rows import RowReader
from albert_serve.tables import TableType, is_stream, type_by_name

# The rows by which the columns of JSONL are known, where the output is a table.
_FIRST_ROWS: Final = 1024
_STDOUT: Final = "/dev/stdout"
_BAR: Final = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"
_LINE: Final = "{desc}: {percentage:.0f}% in {elapsed}, {remaining} left{postfix}"


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
    target = output_path(output)
    is_folder = str(output).endswith(os.sep) or target.is_dir()
    sources = _open_sources(inputs, target, options)
    if is_folder:
        kind = TableType(format=options.output_format or sources[0].type.format)
    else:
        kind = type_by_name(target.name, options.output_format)
    reader = RowReader(scorer.task, options, in_table=kind.has_columns)
    check_head(scorer, reader.parameters)
    for source in sources:
        if source.columns is not None:
            reader.check(str(source.path), source.columns)
    job = _Job(
        scorer=scorer,
        sources=sources,
        kind=kind,
        reader=reader,
        options=options,
        is_stopped=is_stopped,
    )
    if is_stream(target) or is_stdout(target):
        return job.write_stream(target)
    return job.write_parts(target, is_folder=is_folder)


def output_path(output: str | Path) -> Path:
    """Return the path of an output; `-` is the standard output."""
    return Path(_STDOUT if str(output) == "-" else output)


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
    for file in files:
        if target.is_file() and target.samefile(file):
            raise InvalidInputError(f"{target} is also the input; name another output")
    if count > len(files):
        raise InvalidInputError(f"{len(files)} input files cannot be {count} shards")
    return [
        InputFile.open(file, options.input_format, has_quotes=options.has_quotes)
        for file in files[index::count]
    ]


@dataclass(kw_only=True)
class _Job:
    """One run of a job.

    Attributes:
        total: the counts of all rows so far, those of earlier runs among them.
    """

    scorer: Scorer
    sources: Sequence[InputFile]
    kind: TableType
    reader: RowReader
    options: ScoreOptions
    is_stopped: Callable[[], bool]
    total: Counts = field(default_factory=Counts)
    num_resumed_rows: int = 0
    num_run_tokens: int = 0
    num_parts: int = 0
    started_s: float = field(default_factory=time.monotonic)

    @property
    def is_resumable(self) -> bool:
        """Whether the input can be read again."""
        return not any(is_stream(source.path) for source in self.sources)

    def write_stream(self, target: Path) -> ScoreSummary:
        """Write a pipe or a device as the answers come."""
        with writing(target), _open_stream(target) as stream:
            layout, records = self._begin()
            with (
                open_writer(stream, layout, has_header=True) as writer,
                closing(self._parts(records)) as parts,
            ):
                for part in parts:
                    writer.write(part.rows, part.results)
                    self._check_stopped("")
        return self._summary()

    def write_parts(self, target: Path, *, is_folder: bool) -> ScoreSummary:
        """Write parts, and join them into a file."""
        resolved = target.resolve()
        folder = resolved if is_folder else resolved.with_name(f"{resolved.name}.parts")
        with PartFolder.open(
            folder,
            self._description(),
            # What came through a pipe cannot be read again.
            restart=self.options.restart or not self.is_resumable,
            is_temporary=not is_folder,
        ) as parts:
            for entry in parts.entries:
                self.total.add(Counts(**entry.counts))
            self.num_parts = len(parts.entries)
            self.num_resumed_rows = self.total.num_rows
            layout, records = self._begin()
            with closing(self._parts(records)) as answered:
                for part in answered:
                    self._write(parts, layout, part, is_folder=is_folder)
                    self._check_stopped("; the same command goes on" if self.is_resumable else "")
            if not parts.entries:  # so that an empty table has its columns
                self._write(parts, layout, ScoredPart(), is_folder=is_folder)
            if is_folder:
                parts.finish()
            else:
                parts.join(resolved, lambda stream: join(parts.files, stream, layout))
        return self._summary()

    def _begin(self) -> tuple[Layout, Iterator[Record]]:
        """Return the output's layout, and the records that are left to answer."""
        records = self._records(self.num_resumed_rows)
        first: list[Record] = []
        if self.kind.has_columns and all(source.columns is None for source in self.sources):
            # The first of all rows, whatever has been answered before.
            start = self._records(0) if self.num_resumed_rows else records
            first = list(islice(start, _FIRST_ROWS))
            records = records if self.num_resumed_rows else chain(first, records)
        layout = make_layout(self.kind, self.reader, self.sources, self.options.keep, first)
        return layout, records

    def _records(self, num_skipped: int) -> Iterator[Record]:
        return read_records(self.sources, self.reader.fields, self.options.keep, num_skipped)

    def _parts(self, records: Iterator[Record]) -> Generator[ScoredPart, None, None]:
        """Yield the parts, answered, and show the progress."""
        num_bytes = sum(source.num_bytes for source in self.sources)
        with self._progress(num_bytes if self.is_resumable else 0) as bar:
            for part in answer_records(self.scorer, self.reader, records, self.options, self.total):
                yield part
                pa.default_memory_pool().release_unused()
                self.num_parts += 1
                self.num_run_tokens += part.num_tokens
                self._advance(bar, part)

    def _progress(self, num_bytes: int) -> tqdm[Any]:
        if not num_bytes:
            return progress_bar(title=self.scorer.task, unit="rows")
        return progress_bar(
            title=self.scorer.task, total=num_bytes, unit="B", bar_format=_BAR, line_format=_LINE
        )

    def _advance(self, bar: tqdm[Any], part: ScoredPart) -> None:
        duration_s = max(time.monotonic() - self.started_s, 1e-9)
        num_run_rows = self.total.num_rows - self.num_resumed_rows
        position = part.rows[-1].record.position
        if not bar.n and self.num_resumed_rows:
            # The rate is that of this run.
            share = self.num_resumed_rows / self.total.num_rows
            bar.initial = bar.n = int(position * share)
        speed = f"{self.total.num_rows} rows, {num_run_rows / duration_s:.1f} rows/s"
        if self.num_run_tokens:
            speed += f", {self.num_run_tokens / duration_s:.0f} tokens/s"
        bar.set_postfix_str(speed, refresh=False)
        bar.update(position - bar.n if bar.total else len(part.rows))

    def _write(
        self, parts: PartFolder, layout: Layout, part: ScoredPart, *, is_folder: bool
    ) -> None:
        has_header = is_folder or not parts.entries

        def content(stream: BinaryIO) -> None:
            with open_writer(stream, layout, has_header=has_header) as writer:
                writer.write(part.rows, part.results)

        parts.write(self.kind.suffix, asdict(part.counts()), content)

    def _check_stopped(self, advice: str) -> None:
        if self.is_stopped():
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
        """Return what the rows of the output depend on."""
        return {
            "version": __version__,
            "task": self.scorer.task,
            "model": self.scorer.identity,
            "parameters": self.reader.parameters,
            "columns": dict(self.options.columns),
            "keep": self.options.keep,
            "output format": self.kind.suffix,
            "quotes": self.options.has_quotes,
            "inputs": [_input(source) for source in self.sources],
        }


def _input(source: InputFile) -> dict[str, Any]:
    if source.version is None:
        return {"format": source.type.suffix}
    return {
        "format": source.type.suffix,
        "size": source.num_bytes,
        "sha256": sha256_of(source.path),
    }


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
