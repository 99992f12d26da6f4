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

_MAX_CLASSES: Final = 20  # longer tables are truncated
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
    """Run the command line, and return its exit status."""
    parser = make_parser("albert-serve evaluate", __doc__, _EXAMPLES)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help=REFERENCE_HELP)
    add_flags(parser, EvaluateConfig)
    add_heads(parser)
    values, heads = parse_with_heads(parser, LabelledTexts, arguments)

    def run() -> int:
        named_heads = read_heads(LabelledTexts, heads)
        config = read_flags(EvaluateConfig, values, checkpoint=values.checkpoint, heads=named_heads)
        return _run(config)

    return report_errors(run)


def _run(config: EvaluateConfig) -> int:
    metrics, notes = evaluate(config)
    _print_metrics(metrics)
    file = config.metrics_file
    if file is not None:
        content = json.dumps(metrics, indent=2, allow_nan=False) + "\n"
        write_atomically(file, content.encode())
        print(f"Written to {file}.")
    else:
        print("The metrics are not written to a file. Use --output with a model of the Hub.")
    for note in notes:
        print(note)
    return 0


def _print_metrics(metrics: Mapping[str, Any]) -> None:
    width = max(map(len, metrics))
    for name, value in metrics.items():
        if isinstance(value, float):
            print(f"{name:{width}} {value:12,.4f}")
        elif isinstance(value, int):
            print(f"{name:{width}} {value:12,}")
    for name, rows in metrics.items():
        if name.endswith("_classes") and len(rows) > 2:
            _print_classes(rows)


def _print_classes(classes: Mapping[str, Mapping[str, float]]) -> None:
    width = max(map(len, (*classes, "class")))
    unit = list(next(iter(classes.values())))[-1]  # the last column counts texts or entities
    print(f"\n{'class':{width}}  precision  recall      f1 {unit:>8}")
    for name, metrics in islice(classes.items(), _MAX_CLASSES):
        values = " ".join(f"{metrics[key]:8.4f}" for key in ("precision", "recall", "f1"))
        print(f"{name:{width}}  {values} {metrics[unit]:8,}")
    if len(classes) > _MAX_CLASSES:
        print(f"... and {len(classes) - _MAX_CLASSES:,} more, in the file of all metrics")
    print()


if __name__ == "__main__":
    sys.exit(main())
