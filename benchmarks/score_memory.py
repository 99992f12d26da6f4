"""Is a batch job's memory bounded, whatever the size of its input?

Writes files of a chosen size, in CSV and in Parquet with row groups of 1 GB, scores each with
`albert-serve score` and a tiny model, and samples the memory of that process. The rows have a short
text and a long column that is kept, so that reading, parts and joining are most of the work. Their
texts are all distinct, or the same thousand. Prints the table and writes `results.json` into the
output folder, and with `--write` the table into docs/scoring.md. The disk needs three times the
size.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Final

import pyarrow
import torch
from pyarrow import parquet
from transformers import AlbertConfig, AlbertForSequenceClassification

from albert_serve.bundle.manifest import TOKENIZER_FILE
from albert_serve.default_bundle import shipped_bundle
from albert_serve.doctor.memory import Memory, read_memory
from benchmarks.harness.errors import BenchmarkError, last_line
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.tables import bullets, table, write_between
from export.write import export_bundle
from training.errors import report_errors
from training.system.command_line import make_parser

_REPOSITORY: Final = Path(__file__).parents[1]
PAGE: Final = _REPOSITORY / "docs" / "scoring.md"
BEGIN: Final = "<!-- memory: python -m benchmarks.score_memory --write -->"
END: Final = "<!-- end of memory -->"
_ROW_GROUP_BYTES: Final = 1 << 30
_NUM_REPEATED: Final = 1000
_SAMPLE_EVERY_S: Final = 0.2
_ROWS: Final = ("distinct", "duplicates")
_EXAMPLES: Final = """\
examples:
  python -m benchmarks.score_memory --gigabytes 5
  python -m benchmarks.score_memory --gigabytes 0.5 --formats parquet --rows distinct
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row of an input."""

    id: int
    text: str
    body: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """The memory of one job.

    Attributes:
        first_pss_bytes: median of the first tenth of the time in which it wrote parts.
        last_pss_bytes: median of the last tenth of it.
        peak_pss_bytes: of all samples.
        peak_rss_bytes: the system's, so that nothing between samples is missed.
    """

    name: str
    num_rows: int
    input_bytes: int
    output_bytes: int
    duplicate_share: float
    duration_s: float
    first_pss_bytes: int
    last_pss_bytes: int
    peak_pss_bytes: int
    peak_rss_bytes: int

    def cells(self) -> list[str]:
        """Return the cells of a table's row."""
        memory = (
            self.first_pss_bytes,
            self.last_pss_bytes,
            self.peak_pss_bytes,
            self.peak_rss_bytes,
        )
        return [
            self.name,
            f"{self.input_bytes / 1e9:.2f}",
            f"{self.num_rows}",
            f"{self.duplicate_share:.1%}",
            f"{self.duration_s:.0f}",
            *(f"{size / 1e6:.0f}" for size in memory),
        ]


_HEADINGS: Final = [
    *("", "input, GB", "rows", "like earlier", "seconds"),
    *("PSS at first, MB", "at last", "peak", "peak RSS"),
]


def rows_of(kind: str, row_bytes: int) -> Iterator[Row]:
    """Yield rows without end; their texts are distinct or not, their bodies are random."""
    generator = random.Random(0)
    number = 0
    while True:
        text = number if kind == "distinct" else generator.randrange(_NUM_REPEATED)
        body = generator.randbytes(row_bytes // 2).hex()
        yield Row(id=number, text=f"review number {text} is fine", body=body)
        number += 1


def write_csv(file: Path, rows: Iterator[Row], num_bytes: int) -> None:
    """Write rows until the file has so many bytes."""
    with file.open("w", encoding="ascii") as stream:
        stream.write("id,text,body\n")
        while stream.tell() < num_bytes:
            lines = (f"{row.id},{row.text},{row.body}\n" for row in islice(rows, 1000))
            stream.write("".join(lines))


def write_parquet(file: Path, rows: Iterator[Row], num_bytes: int) -> None:
    """Write rows of so many bytes, in as large row groups as there may be."""
    schema = pyarrow.schema(
        [("id", pyarrow.int64()), ("text", pyarrow.string()), ("body", pyarrow.string())]
    )
    num_left = num_bytes
    with parquet.ParquetWriter(file, schema, use_dictionary=False) as writer:
        while num_left > 0:
            batches: list[pyarrow.RecordBatch] = []
            group_bytes = min(num_left, _ROW_GROUP_BYTES)
            while sum(batch.nbytes for batch in batches) < group_bytes:
                content = [asdict(row) for row in islice(rows, 1000)]
                batches.append(pyarrow.RecordBatch.from_pylist(content, schema))
            group = pyarrow.Table.from_batches(batches)
            num_left -= group.nbytes
            writer.write_table(group, row_group_size=len(group))


_WRITERS: Final[dict[str, Callable[[Path, Iterator[Row], int], None]]] = {
    "csv": write_csv,
    "parquet": write_parquet,
}


def make_bundle(folder: Path) -> Path:
    """Export a classifier that costs next to nothing."""
    torch.manual_seed(0)
    checkpoint = folder / "checkpoint"
    config = AlbertConfig(
        embedding_size=16,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
    )
    AlbertForSequenceClassification(config).save_pretrained(checkpoint)
    shutil.copyfile(shipped_bundle() / TOKENIZER_FILE, checkpoint / TOKENIZER_FILE)
    return export_bundle(checkpoint, folder / "bundle", overwrite=True).bundle.folder


def measure(bundle: Path, source: Path, name: str) -> Measurement:
    """Score a file in a process of its own, and watch its memory."""
    output = source.with_name(f"scored-{source.name}")
    summary = source.with_name("summary.json")
    parts = output.with_name(f"{output.name}.parts")
    options = ["--task", "text-classification", "--bundle", str(bundle), "--restart"]
    command = [sys.executable, "-m", "albert_serve", "score", *options, "--summary", str(summary)]
    errors = source.with_name("errors.txt")
    samples: list[Memory] = []
    scoring: list[int] = []  # while it neither hashes the input nor joins the parts
    began_s = time.perf_counter()
    with (
        errors.open("wb") as stream,
        subprocess.Popen(
            [*command, str(source), str(output)], cwd=_REPOSITORY, stdout=stream, stderr=stream
        ) as process,
    ):
        while process.poll() is None:
            memory = read_memory(Path(f"/proc/{process.pid}"))
            if memory is not None:
                samples.append(memory)
                if (parts / "_parts.jsonl").exists() and not (parts / ".joined.partial").exists():
                    scoring.append(memory.pss_bytes)
            time.sleep(_SAMPLE_EVERY_S)
    duration_s = time.perf_counter() - began_s
    if process.returncode:
        raise BenchmarkError(f"the job ended with {process.returncode}: {last_line(errors)}")
    counts = json.loads(summary.read_bytes())
    scoring = scoring or [sample.pss_bytes for sample in samples]  # of a job that is over at once
    tenth = max(1, len(scoring) // 10)
    measurement = Measurement(
        name=name,
        num_rows=counts["num_rows"],
        input_bytes=source.stat().st_size,
        output_bytes=output.stat().st_size,
        duplicate_share=counts["duplicate_share"],
        duration_s=duration_s,
        first_pss_bytes=sorted(scoring[:tenth])[tenth // 2],
        last_pss_bytes=sorted(scoring[-tenth:])[tenth // 2],
        peak_pss_bytes=max(sample.pss_bytes for sample in samples),
        peak_rss_bytes=max(sample.peak_bytes for sample in samples),
    )
    output.unlink()
    return measurement


def _run(options: argparse.Namespace) -> int:
    folder: Path = options.output
    folder.mkdir(parents=True, exist_ok=True)
    machine = list(describe_machine(1))
    bundle = make_bundle(folder)
    measurements = []
    for form in options.formats:
        for kind in options.rows:
            source = folder / f"{kind}.{form}"
            rows = rows_of(kind, options.row_bytes)
            _WRITERS[form](source, rows, int(options.gigabytes * 1e9))
            measurements.append(measure(bundle, source, f"{form}, {kind}"))
            print(measurements[-1], flush=True)
            source.unlink()
    text = report(measurements, machine)
    print(f"\n{text}")
    content = {"jobs": [asdict(one) for one in measurements], "machine": machine}
    (folder / "results.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    if options.write:
        write_between(PAGE, BEGIN, END, text)
    return 0


def report(measurements: Sequence[Measurement], machine: Sequence[str]) -> str:
    """Return the table of all jobs, and the machine, in Markdown."""
    rows = [measurement.cells() for measurement in measurements]
    return f"{table(_HEADINGS, rows)}\n\n{bullets(machine)}\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    options = _parser().parse_args(arguments)
    return report_errors(lambda: _run(options))


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("benchmarks.score_memory", __doc__, _EXAMPLES)
    add = parser.add_argument
    add("--gigabytes", type=float, default=5.0, help="of each input (%(default)s)")
    add("--row-bytes", type=int, default=20000, help="of a row's long column (%(default)s)")
    add("--formats", nargs="+", choices=list(_WRITERS), default=list(_WRITERS), help="(all)")
    add("--rows", nargs="+", choices=_ROWS, default=_ROWS, help="(all)")
    add("--output", type=Path, default=Path("runs/bench-score-memory"), help="(%(default)s)")
    add("--write", action="store_true", help=f"put the table into {PAGE.name}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
