"""The paper's ablations at small scale: sharing, size of the embeddings, sentence task.

Every model is pretrained on the same number of tokens and measured on the same held-out text.
Writes `runs/`, `results.json` and `ablations.md` (tables with the paper's figures) into the output
folder. The same command resumes an ablation that was stopped and repeats no finished run; with more
`--tables` or another `--seed` it adds runs.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, get_args

import torch

from albert_serve.files import write_atomically
from benchmarks.ablations.findings import VariantResults, render
from benchmarks.ablations.runs import AblationSetup, make_runs, read_result
from benchmarks.ablations.tables import (
    AblationBase,
    AblationTable,
    TableName,
    Variant,
    distinct_variants,
)
from training.errors import report_errors
from training.loop.progress import is_known_run, record_run
from training.run.options import add_device, parse_count, parse_part
from training.system.command_line import make_parser

_EXAMPLES: Final = r"""examples:
  python -m benchmarks.ablations --shards wiki-shards/ --validation held-out-shards/ \
      --tokenizer vocab/ --output runs/ablations --steps 2000
  python -m benchmarks.ablations --shards wiki-shards/ --validation held-out-shards/ \
      --tokenizer vocab/ --output runs/sentence --tables sentence --seed 1 --steps 1000 \
      --hidden-size 128 --layers 4 --length 64 --batch-size 64
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    options = _parser().parse_args(arguments)
    return report_errors(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    setup = _setup(options)
    base = AblationBase(
        hidden_size=options.hidden_size,
        embedding_size=options.embedding_size,
        embedding_sizes=tuple(options.embedding_sizes),
        num_steps=options.steps,
        seed=options.seed,
    )
    tables = [base.table(name) for name in dict.fromkeys(options.tables)]
    settings = setup.settings()
    if not is_known_run(options.output, {"ablation": settings}):
        record_run(options.output, {"ablation": settings})
    variants = distinct_variants(tables)
    try:
        return make_runs(setup, variants, options.output / "runs")
    finally:
        _write_report(options.output, tables, variants, setup)


def _setup(options: argparse.Namespace) -> AblationSetup:
    return AblationSetup(
        shards=options.shards,
        validation=options.validation,
        tokenizer=options.tokenizer,
        hidden_size=options.hidden_size,
        num_layers=options.layers,
        num_heads=options.heads,
        length=options.length,
        batch_size=options.batch_size,
        sentence_weight=options.sentence_weight,
        held_out_tokens=options.held_out_tokens,
        compiles=options.compile,
        device=options.device,
    )


def _write_report(
    folder: Path, tables: Sequence[AblationTable], variants: Sequence[Variant], setup: AblationSetup
) -> None:
    """Write the results of all finished runs, if there are any."""
    all_results = {variant: read_result(folder / "runs" / variant.name) for variant in variants}
    results = {variant: result for variant, result in all_results.items() if result is not None}
    if not results:
        return
    record = {
        "settings": setup.settings(),
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "torch": torch.__version__,
            "device": str(setup.device),
        },
        "runs": {variant.name: dict(result.figures) for variant, result in results.items()},
    }
    write_atomically(folder / "results.json", (json.dumps(record, indent=2) + "\n").encode())
    text = render(tables, results, _heading(setup, results, len(variants)))
    write_atomically(folder / "ablations.md", text.encode())
    print(text)
    print(f"{folder / 'ablations.md'}: {len(results)} of {len(variants)} runs")


def _heading(setup: AblationSetup, results: VariantResults, num_variants: int) -> list[str]:
    """Return the description of the runs and of their held-out text."""
    millions = [run.figures["tokens"] / 1e6 for each, run in results.items() if each.num_steps > 1]
    tokens = f", {min(millions):.2f} to {max(millions):.2f}M tokens each" if millions else ""
    figures = next(iter(results.values())).figures
    runs = (
        f"Hidden {setup.hidden_size}, {setup.num_layers} layers, {setup.num_heads} heads, "
        f"{setup.batch_size} rows of {setup.length} tokens a step, weight of the sentence task "
        f"{setup.sentence_weight:g}; {len(results)} of {num_variants} runs{tokens}."
    )
    measured_on = (
        f"Held-out: {figures['masked_tokens']:,} masked tokens, {figures['nsp_pairs']:,.0f} NSP "
        f"and {figures['sop_pairs']:,.0f} SOP pairs. ± is one standard error of sampling, without "
        "what another seed would change."
    )
    return [runs, "", measured_on]


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("benchmarks.ablations", __doc__, _EXAMPLES)
    add = parser.add_argument
    add("--shards", type=Path, required=True, help="folder that training.prepare wrote")
    add("--validation", type=Path, required=True, help="the same of held-out text")
    add("--tokenizer", type=Path, required=True, help="folder that training.vocab wrote")
    add("--output", type=Path, required=True, help="the ablation's folder")
    some = ["sentence", "sharing", "embedding"]
    add(
        "--tables", nargs="+", choices=get_args(TableName), default=some, help=f"({' '.join(some)})"
    )
    add("--steps", type=parse_count, required=True, help="of each run")
    add("--seed", type=int, default=0, help="of each run (0)")
    add = parser.add_argument_group("the models").add_argument
    add("--hidden-size", type=parse_count, default=256, help="(%(default)s)")
    add("--layers", type=parse_count, default=6, help="(%(default)s)")
    add("--heads", type=parse_count, default=4, help="(%(default)s)")
    add("--embedding-size", type=parse_count, default=128, help="E, but in its table (128)")
    sizes = "sizes of the embedding tables, beside the hidden size (64 128 256)"
    widths = [64, 128, 256]
    add("--embedding-sizes", nargs="+", type=parse_count, default=widths, metavar="E", help=sizes)
    add("--length", type=parse_count, default=128, help="tokens a row (%(default)s)")
    add("--batch-size", type=parse_count, default=32, help="rows a step (%(default)s)")
    add("--sentence-weight", type=parse_part, default=1.0, help="of the sentence task's loss (1)")
    held_out = (
        "held-out text of each form to measure on, and text to train a probe on (%(default)s)"
    )
    add("--held-out-tokens", type=parse_count, default=1 << 18, help=held_out)
    machine = parser.add_argument_group("the machine")
    add_device(machine)
    compiles = "worth its minutes from some thousand steps on"
    machine.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=True, help=compiles
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
