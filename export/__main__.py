"""The command line: `python -m export CHECKPOINT_DIR BUNDLE_DIR`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from albert_serve.bundle import WEIGHTS_FILE
from albert_serve.errors import AlbertServeError
from export.errors import ExportError
from export.source import read_json_object
from export.write import Exported, export_bundle
from training.checkpoint import CheckpointError
from training.vocab import VocabError

_EXAMPLES: Final = """\
examples:
  python -m export runs/base/checkpoint models/base
  python -m export albert-base-v2 /tmp/bundle --overwrite
  python -m export runs/qa bundles/qa --evaluation results.json --max-difference 3e-4

CHECKPOINT_DIR is a Hugging Face directory, ours or one that transformers wrote, with config.json,
model.safetensors and tokenizer.json (or spiece.model). Its evaluation.json and training.json go
into the bundle's manifest. BUNDLE_DIR appears whole or not at all.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    options = _parser().parse_args(arguments)
    try:
        evaluation = _read_evaluation(options.evaluation)
        exported = export_bundle(
            options.checkpoint,
            options.bundle,
            evaluation=evaluation,
            max_difference=options.max_difference,
            overwrite=options.overwrite,
        )
    except (ExportError, CheckpointError, VocabError, AlbertServeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if exported.unused:
        listed = ", ".join(exported.unused)
        print(f"warning: no task reads these weights of the file: {listed}", file=sys.stderr)
    print(summarize(exported))
    return 0


def summarize(exported: Exported) -> str:
    """Sizes and differences, for people."""
    manifest = exported.bundle.manifest
    sizes = {name: entry.size for name, entry in manifest.files.items()}
    graphs = sum(size for name, size in sizes.items() if name.endswith(".onnx"))
    total = sum(sizes.values())
    weights = sizes[WEIGHTS_FILE]
    parity = (f"  {name:<24} {value:>14.1e}" for name, value in manifest.parity.items())
    return "\n".join(
        [
            str(exported.bundle.folder),
            *(f"  {name:<24} {size:>14,} bytes" for name, size in sizes.items()),
            f"  {'graphs':<24} {graphs:>14,} bytes, which hold no weight",
            f"  {'bundle / checkpoint':<24} {total / weights:>14.3f} times {WEIGHTS_FILE}",
            "largest difference from torch",
            *parity,
        ]
    )


def _read_evaluation(file: Path | None) -> dict[str, object]:
    if file is None:
        return {}
    if not file.is_file():
        raise ExportError(f"--evaluation {file} is not there")
    return read_json_object(file)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m export",
        description="Write an ALBERT checkpoint as the bundle that albert-serve opens.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT_DIR")
    parser.add_argument("bundle", type=Path, metavar="BUNDLE_DIR")
    parser.add_argument(
        "--evaluation", type=Path, metavar="FILE.json", help="results to put into the manifest"
    )
    parser.add_argument(
        "--max-difference",
        type=float,
        default=1e-4,
        help="largest absolute difference from torch that is let through (%(default)s)",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the bundle that is at BUNDLE_DIR"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
