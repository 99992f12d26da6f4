"""Is the layer stored once, on disk and in memory, at each of the paper's sizes?

Exports random weights of each size in each precision and measures what bundles take on disk, and
what one and several processes hold in memory. Prints the table.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
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
from export.bundle import export_bundle
from training.errors import report_errors
from training.system.command_line import make_parser

_SIZES: Final = ("base", "large", "xlarge", "xxlarge")
_EXAMPLES: Final = """\
examples:
  python -m benchmarks.sizes
  python -m benchmarks.sizes --sizes base xxlarge --precisions fp32 int8 --processes 1 2 4

xxlarge in all precisions wants 6 GB of disk and 4 GB of memory.
"""


def measure(
    checkpoint: Path, size: str, precision: Precision, folder: Path, processes: Sequence[int]
) -> list[str]:
    """Export a checkpoint, look at its bundle on disk and in memory, and return a table's row."""
    target = folder / f"{size}-{precision}"
    exported = export_bundle(checkpoint, target, precision=precision, overwrite=True)
    sizes = {name: entry.size for name, entry in exported.bundle.manifest.files.items()}
    footprints = [_footprint(exported.bundle, folder / "cache", number) for number in processes]
    shutil.rmtree(target)
    graphs_bytes = sum(size for name, size in sizes.items() if name.endswith(".onnx"))
    return [
        size,
        precision,
        f"{sizes[WEIGHTS_FILE] / 1e6:.1f}",
        f"{sizes[WEIGHTS_FILE] / exported.fp32_bytes:.3f}",
        f"{sum(sizes.values()) / exported.fp32_bytes:.3f}",
        f"{graphs_bytes / 1e3:.0f}",
        *(f"{one.weights_over_file:.2f}" for one in footprints),
        *(f"{one.after.pss_bytes / 1e6:.0f}" for one in footprints),
    ]


def _headings(processes: Sequence[int]) -> list[str]:
    number = [f"{n} process{'es' if n > 1 else ''}" for n in processes]
    return [
        *("size", "precision", "weights, MB", "of fp32", "bundle, of fp32 weights", "graphs, kB"),
        *(f"weights in memory over file, {each}" for each in number),
        *(f"PSS in all, MB, {each}" for each in number),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    options = _parser().parse_args(arguments)
    return report_errors(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    folder: Path = options.output
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[list[str]] = []
    with tqdm(total=len(options.sizes) * len(options.precisions), disable=None) as bar:
        for size in options.sizes:
            checkpoint = _random_checkpoint(size, folder / "checkpoint")
            for precision in options.precisions:
                bar.set_description(f"{size} {precision}")
                rows.append(measure(checkpoint, size, precision, folder, options.processes))
                bar.update()
            shutil.rmtree(checkpoint)
    shutil.rmtree(folder / "cache", ignore_errors=True)
    print(table(_headings(options.processes), rows))
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
