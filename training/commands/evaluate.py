"""Evaluate a checkpoint on held-out data, each task by its own metric.

The command prints a table and writes `evaluation.json` into the checkpoint's folder. `export`
copies it into the bundle.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Final

from albert_serve.files import write_atomically
from albert_serve.terminal import make_parser
from training.conversion.source import REFERENCE_HELP
from training.errors import report_errors
from training.evaluation.config import EvaluateConfig
from training.evaluation.run import evaluate
from training.options.flags import add_flags, read_flags
from training.options.heads import add_heads, parse_with_heads, read_heads
from training.options.labelled import LabelledTexts

_MAX_CLASSES: Final = 20  # that are printed
_EXAMPLES: Final = r"""examples:
  albert-serve evaluate runs/base/checkpoint --pretraining wiki/validation.jsonl.xz
  albert-serve evaluate runs/tasks/checkpoint --text-classification sst2/dev.tsv \
      --question-answering squad/dev-v1.1.json --output figures.json
  albert-serve evaluate runs/rte/best --task RTE --data glue/RTE
  albert-serve evaluate runs/both/best --text-classification sst2/dev.tsv \
      --head topic --text-classification news/test.csv --label-column category
  albert-serve evaluate runs/race/best --multiple-choice RACE/test
  albert-serve evaluate textattack/albert-base-v2-SST-2 --text-classification sst2/dev.tsv
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    parser = make_parser("albert-serve evaluate", __doc__, _EXAMPLES)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help=REFERENCE_HELP)
    add_flags(parser, EvaluateConfig)
    add_heads(parser)
    values, heads = parse_with_heads(parser, LabelledTexts, arguments)

    def run() -> int:
        others = {"checkpoint": values.checkpoint, "heads": read_heads(LabelledTexts, heads)}
        return _run(read_flags(EvaluateConfig, values, **others))

    return report_errors(run)


def _run(config: EvaluateConfig) -> int:
    figures, notes = evaluate(config)
    _print_figures(figures)
    file = config.figures_file
    if file is not None:
        content = json.dumps(figures, indent=2, allow_nan=False) + "\n"
        write_atomically(file, content.encode())
        print(f"written to {file}")
    else:
        print("not written to a file, which --output names for a model of the Hub")
    for note in notes:
        print(note)
    return 0


def _print_figures(figures: Mapping[str, Any]) -> None:
    width = max(map(len, figures))
    for name, value in figures.items():
        if isinstance(value, float):
            print(f"{name:{width}} {value:12,.4f}")
        elif isinstance(value, int):
            print(f"{name:{width}} {value:12,}")
    for name, rows in figures.items():
        if name.endswith("_classes") and len(rows) > 2:
            _print_classes(rows)


def _print_classes(classes: Mapping[str, Mapping[str, float]]) -> None:
    width = max(map(len, (*classes, "class")))
    counted = list(next(iter(classes.values())))[-1]  # texts, or entities
    print(f"\n{'class':{width}}  precision  recall      f1 {counted:>8}")
    for name, figures in islice(classes.items(), _MAX_CLASSES):
        shown = " ".join(f"{figures[key]:8.4f}" for key in ("precision", "recall", "f1"))
        print(f"{name:{width}}  {shown} {figures[counted]:8,}")
    if len(classes) > _MAX_CLASSES:
        print(f"... and {len(classes) - _MAX_CLASSES:,} more, in the file of all figures")
    print()


if __name__ == "__main__":
    sys.exit(main())
