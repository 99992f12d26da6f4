"""Is a batch job's memory bounded, whatever the size of its input?

Writes a CSV and a Parquet file (with row groups of 1 GB) of a chosen size, scores each with
`albert-serve score` and a tiny model, and samples the memory of that process. The rows have a short
text and a long column that is kept, so that reading, parts and joining are most of the work. Prints
the table, and with `--write` puts it into docs/scoring.md. The disk needs three times the size.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import psutil
import pyarrow
import torch
from pyarrow import csv, parquet

from albert_serve.config import AlbertConfig
from albert_serve.default_bundle import shipped_bundle
from benchmarks.harness.page import bullets, describe_machine, table, write_between
from benchmarks.harness.process import REPOSITORY, BenchmarkError, last_line
from export.bundle import export_bundle
from training.errors import report_errors
from training.model.checkpoint import save_checkpoint
from training.model.heads import AlbertForTasks
from training.system.command_line import make_parser

_PAGE: Final = REPOSITORY / "docs" / "scoring.md"
_BEGIN: Final = "<!-- memory: python -m benchmarks.score_memory --write -->"
_END: Final = "<!-- end of memory -->"
_FORMATS: Final = ("csv", "parquet")
_ROW_GROUP_BYTES: Final = 1 << 30
_SAMPLE_EVERY_S: Final = 0.2
_SCHEMA: Final = pyarrow.schema(
    [("id", pyarrow.int64()), ("text", pyarrow.string()), ("body", pyarrow.string())]
)
_EXAMPLES: Final = """\
examples:
  python -m benchmarks.score_memory --gigabytes 5 --write
  python -m benchmarks.score_memory --gigabytes 0.5
"""


class MemoryMeasurement(NamedTuple):
    """The memory of one job.

    Attributes:
        at_first_bytes: median of the first tenth of the time in which it wrote parts.
        at_last_bytes: median of the last tenth of it.
        peak_bytes: of all samples.
    """

    num_rows: int
    duration_s: float
    at_first_bytes: int
    at_last_bytes: int
    peak_bytes: int


def measure_memory(bundle: Path, source: Path) -> MemoryMeasurement:
    """Score a file in a process of its own, and sample its memory (PSS)."""
    output, summary = source.with_name(f"scored-{source.name}"), source.with_name("summary.json")
    log = source.with_name("errors.txt")
    command = [
        *(sys.executable, "-m", "albert_serve", "score", str(source), str(output)),
        *("--task", "text-classification", "--bundle", str(bundle), "--restart"),
        *("--summary", str(summary)),
    ]
    samples: list[int] = []
    began_s = time.perf_counter()
    with log.open("wb") as stream:
        process = psutil.Popen(command, cwd=REPOSITORY, stdout=stream, stderr=stream)
        while process.poll() is None:
            with contextlib.suppress(psutil.Error):  # it has just ended
                samples.append(process.memory_full_info().pss)
            time.sleep(_SAMPLE_EVERY_S)
    duration_s = time.perf_counter() - began_s
    if process.returncode:
        raise BenchmarkError(f"the job ended with {process.returncode}: {last_line(log)}")
    output.unlink()
    # It opens the model and hashes its input before, and joins the parts afterwards.
    scoring = samples[len(samples) // 10 : -max(1, len(samples) // 10)] or samples
    tenth = max(1, len(scoring) // 10)
    return MemoryMeasurement(
        num_rows=json.loads(summary.read_bytes())["num_rows"],
        duration_s=duration_s,
        at_first_bytes=int(median(scoring[:tenth])),
        at_last_bytes=int(median(scoring[-tenth:])),
        peak_bytes=max(samples),
    )


def write_rows(file: Path, num_bytes: int, row_bytes: int) -> None:
    """Write about so many bytes of rows, as CSV or as Parquet by the file's name.

    Row groups of Parquet are as large as they may be.
    """
    num_rows = max(1, num_bytes // row_bytes)
    rows_a_group = max(1, _ROW_GROUP_BYTES // row_bytes)
    writer: Any
    if file.suffix == ".csv":
        writer = csv.CSVWriter(file, _SCHEMA)
    else:
        writer = parquet.ParquetWriter(file, _SCHEMA, use_dictionary=False)
    generator = random.Random(0)
    with writer:
        for start in range(0, num_rows, rows_a_group):
            ids = range(start, min(start + rows_a_group, num_rows))
            columns = {
                "id": ids,
                "text": [f"review number {number} is fine" for number in ids],
                "body": [generator.randbytes(row_bytes // 2).hex() for _ in ids],
            }
            writer.write_table(pyarrow.table(columns, _SCHEMA), rows_a_group)


def make_tiny_bundle(folder: Path) -> Path:
    """Export a classifier that costs next to nothing."""
    torch.manual_seed(0)
    config = AlbertConfig(
        vocab_size=12000,
        embedding_size=16,
        hidden_size=32,
        num_layers=1,
        num_heads=2,
        ffn_size=32,
        max_positions=64,
    )
    model = AlbertForTasks(config, {"text-classification": 2})
    save_checkpoint(model, folder / "checkpoint", tokenizer_from=shipped_bundle())
    return export_bundle(folder / "checkpoint", folder / "bundle", overwrite=True).bundle.folder


def _run(options: argparse.Namespace) -> int:
    folder: Path = options.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    machine = list(describe_machine(1))
    bundle = make_tiny_bundle(folder)
    rows = []
    for form in _FORMATS:
        source = folder / f"rows.{form}"
        write_rows(source, int(options.gigabytes * 1e9), options.row_bytes)
        input_gb = f"{source.stat().st_size / 1e9:.2f}"
        measured = measure_memory(bundle, source)
        source.unlink()
        memory = [f"{size / 1e6:.0f}" for size in measured[2:]]
        counts = [str(measured.num_rows), f"{measured.duration_s:.0f}"]
        rows.append([form, input_gb, *counts, *memory])
    headings = ["", "input, GB", "rows", "seconds", "PSS at first, MB", "at last", "peak"]
    text = f"{table(headings, rows)}\n\n{bullets(machine)}\n"
    print(text)
    if options.write:
        write_between(_PAGE, _BEGIN, _END, text)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    parser = make_parser("benchmarks.score_memory", __doc__, _EXAMPLES)
    add = parser.add_argument
    add("--gigabytes", type=float, default=5.0, help="of each input (%(default)s)")
    add("--row-bytes", type=int, default=20000, help="of a row's long column (%(default)s)")
    add("--output", type=Path, default=Path("runs/bench-score-memory"), help="(%(default)s)")
    add("--write", action="store_true", help=f"put the table into {_PAGE.name}")
    options = parser.parse_args(arguments)
    return report_errors(lambda: _run(options))


if __name__ == "__main__":
    sys.exit(main())
