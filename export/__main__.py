"""The command line: `albert-serve export CHECKPOINT BUNDLE_DIR`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from albert_serve.terminal import make_parser
from export.config import ExportConfig
from export.job import export, report
from training.conversion.source import REFERENCE_HELP
from training.errors import report_errors
from training.options.flags import add_flags, read_flags
from training.options.heads import add_heads, parse_with_heads, read_heads
from training.options.labelled import LabelledTexts

_EXAMPLES: Final = """\
examples:
  albert-serve export runs/base/checkpoint models/base
  albert-serve export runs/base/checkpoint models/base-int8 --precision int8 \\
      --text-classification sst2/dev.tsv --question-answering squad/dev-v1.1.json
  albert-serve export runs/both/best bundles/both --precision int8 \\
      --text-classification sst2/dev.tsv --head topic --text-classification news/test.csv
  albert-serve export albert/albert-base-v2 bundles/base
  albert-serve export textattack/albert-base-v2-SST-2@main bundles/sst2 --precision int8 \\
      --keep-fp32 embeddings heads
  albert-serve export albert_base/ bundles/base

CHECKPOINT is a folder, or a model of the Hugging Face Hub: a checkpoint of albert-serve or
transformers, or an archive of Google (albert_config.json, model.ckpt-best.*, 30k-clean.model). The
manifest contains its evaluation.json and training.json. BUNDLE_DIR appears when it is complete.

With held-out data of a task, export measures the task's metric in torch and from the bundle, and
writes both into the manifest. Without data, it prints the difference of the probabilities.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit status."""
    parser = make_parser(
        "albert-serve export",
        "Export an ALBERT checkpoint as a bundle, which albert-serve opens.",
        _EXAMPLES,
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help=REFERENCE_HELP)
    parser.add_argument(
        "bundle", type=Path, metavar="BUNDLE_DIR", help="folder of the bundle to write"
    )
    add_flags(parser, ExportConfig)
    add_heads(parser)
    values, heads = parse_with_heads(parser, LabelledTexts, arguments)

    def run() -> int:
        own = {"checkpoint": values.checkpoint, "bundle": values.bundle}
        config = read_flags(ExportConfig, values, heads=read_heads(LabelledTexts, heads), **own)
        report(export(config))
        return 0

    return report_errors(run)


if __name__ == "__main__":
    sys.exit(main())
