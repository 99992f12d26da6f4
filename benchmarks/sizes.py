"""Is the layer stored once, on disk and in memory, at each of the paper's sizes?

Exports random weights of each size in each precision and measures what bundles take on disk, how
long they take to open, and what one and several processes hold in memory. Writes `sizes.md` and
`sizes.json` into the output folder.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, get_args

import torch
from tqdm import tqdm
from transformers import AlbertConfig as HfConfig
from transformers import AlbertForPreTraining

from albert_serve.bundle.manifest import TOKENIZER_FILE, WEIGHTS_FILE, Bundle, Precision
from albert_serve.config import preset
from albert_serve.default_bundle import shipped_bundle
from albert_serve.doctor.footprint import Footprint, measure_footprint
from albert_serve.settings import Prepack, RuntimeOptions
from benchmarks.harness.page import table
from export.write import export_bundle
from training.errors import report_errors
from training.system.command_line import make_parser

_SIZES: Final = ("base", "large", "xlarge", "xxlarge")
_EXAMPLES: Final = """\
examples:
  python -m benchmarks.sizes
  python -m benchmarks.sizes --sizes base xxlarge --precisions fp32 int8 --processes 1 2 4

xxlarge in all precisions wants 6 GB of disk and 4 GB of memory.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeRow:
    """One size in one precision.

    Attributes:
        fp32_bytes: of the checkpoint's weights.
        weights_bytes: of the bundle's.
        graphs_bytes: of all graphs.
        bundle_bytes: of all files.
        footprints: of each number of processes.
    """

    size: str
    precision: str
    fp32_bytes: int
    weights_bytes: int
    graphs_bytes: int
    bundle_bytes: int
    footprints: list[Footprint]

    def cells(self) -> list[str]:
        """Return the cells of a table's row."""
        disk = [
            f"{self.weights_bytes / 1e6:.1f}",
            f"{self.weights_bytes / self.fp32_bytes:.3f}",
            f"{self.bundle_bytes / self.fp32_bytes:.3f}",
            f"{self.graphs_bytes / 1e3:.0f}",
        ]
        memory = [f"{one.weights_over_file:.2f}" for one in self.footprints]
        memory += [f"{one.after.pss_bytes / 1e6:.0f}" for one in self.footprints]
        opening_s = self.footprints[0].sessions_s
        return [self.size, self.precision, *disk, *memory, f"{opening_s:.2f}"]


def measure(
    checkpoint: Path, size: str, precision: Precision, folder: Path, processes: Sequence[int]
) -> SizeRow:
    """Export a checkpoint, and look at its bundle on disk and in memory."""
    target = folder / f"{size}-{precision}"
    exported = export_bundle(checkpoint, target, precision=precision, overwrite=True)
    sizes = {name: entry.size for name, entry in exported.bundle.manifest.files.items()}
    footprints = [_footprint(exported.bundle, folder / "cache", number) for number in processes]
    row = SizeRow(
        size=size,
        precision=precision,
        fp32_bytes=exported.fp32_bytes,
        weights_bytes=sizes[WEIGHTS_FILE],
        graphs_bytes=sum(size for name, size in sizes.items() if name.endswith(".onnx")),
        bundle_bytes=sum(sizes.values()),
        footprints=footprints,
    )
    shutil.rmtree(target)
    return row


def size_table(rows: Sequence[SizeRow], processes: Sequence[int]) -> str:
    """The rows in Markdown."""
    number = [f"{n} process{'es' if n > 1 else ''}" for n in processes]
    header = [
        *("size", "precision", "weights, MB", "of fp32", "bundle, of fp32 weights", "graphs, kB"),
        *(f"weights in memory over file, {each}" for each in number),
        *(f"PSS in all, MB, {each}" for each in number),
        "seconds to open",
    ]
    return table(header, [row.cells() for row in rows]) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    options = _parser().parse_args(arguments)
    return report_errors(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    folder: Path = options.output
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[SizeRow] = []
    with tqdm(total=len(options.sizes) * len(options.precisions), disable=None) as bar:
        for size in options.sizes:
            checkpoint = _random_checkpoint(size, folder / "checkpoint")
            for precision in options.precisions:
                bar.set_description(f"{size} {precision}")
                rows.append(measure(checkpoint, size, precision, folder, options.processes))
                bar.update()
            shutil.rmtree(checkpoint)
    shutil.rmtree(folder / "cache", ignore_errors=True)
    text = size_table(rows, options.processes)
    (folder / "sizes.md").write_text(text, encoding="utf-8")
    (folder / "sizes.json").write_text(json.dumps([asdict(row) for row in rows], indent=2))
    print(text)
    return 0


def _footprint(bundle: Bundle, cache: Path, num_processes: int) -> Footprint:
    """One process packs weights in memory, several share them on disk, as in the service."""
    prepack: Prepack = "memory" if num_processes == 1 else "cache"
    made = RuntimeOptions(
        device="cpu", num_threads=1, prepack=prepack, cache_folder=cache.absolute()
    )
    if prepack == "cache":
        measure_footprint(bundle, made, 1)  # so that it is there
    return measure_footprint(bundle, made, num_processes)


def _random_checkpoint(size: str, folder: Path) -> Path:
    torch.manual_seed(0)
    config = preset(size).to_hf()
    del config["model_type"]
    AlbertForPreTraining(HfConfig(**config)).save_pretrained(folder)
    shutil.copyfile(shipped_bundle() / TOKENIZER_FILE, folder / TOKENIZER_FILE)
    return folder


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("benchmarks.sizes", __doc__, _EXAMPLES)
    add = parser.add_argument
    add("--sizes", nargs="+", choices=_SIZES, default=_SIZES, help="(all)")
    precisions = get_args(Precision)
    add("--precisions", nargs="+", choices=precisions, default=precisions, help="(all)")
    add("--processes", nargs="+", type=int, default=[1, 4], metavar="N", help="(1 4)")
    add("--output", type=Path, default=Path("runs/bench-sizes"), help="(%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
