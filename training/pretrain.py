"""Pretraining from text: masked n-grams and sentence order (Lan et al. 2019, section 3.1).

Writes into the output folder: `checkpoints/`, of which `checkpoint` is the newest (Hugging Face
directories), `metrics.jsonl`, `layers.jsonl` and `tensorboard/`. The same command resumes a run
that was stopped or killed. On several GPUs or hosts start it with torchrun.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from albert_serve.tokenizer import AlbertTokenizer
from training.errors import report_errors
from training.loop.distributed import join_world
from training.loop.progress import is_known_run
from training.loop.reproducibility import run_precision
from training.run.options import add_end, add_reports, check_end
from training.run.pretraining import corpus_record, make_job, train_job
from training.run.pretraining_options import (
    add_data,
    add_machine,
    add_recipe,
    add_sizes,
    changed_recipe,
    make_config,
    open_start,
)
from training.run.recipes import RECIPES
from training.system.command_line import make_parser

_EXAMPLES: Final = r"""examples:
  python -m training.pretrain --corpus wiki/*.jsonl.xz --tokenizer vocab/ --output runs/base \
      --preset base --recipe paper
  python -m training.pretrain --shards wiki-shards/ --tokenizer vocab/ --output runs/small \
      --preset small --recipe small --budget 2h --validation held-out.jsonl
  torchrun --nproc-per-node 8 -m training.pretrain --shards wiki-shards/ --tokenizer vocab/ \
      --output runs/xxlarge --preset xxlarge --recipe paper --parallel fsdp --recompute
  python -m training.pretrain --initialize-from runs/3-layers/checkpoint --layers 12 \
      --shards wiki-shards/ --tokenizer vocab/ --output runs/12-layers --budget 2h
  python -m training.pretrain --initialize-from albert/albert-base-v2 --corpus letters/ \
      --output runs/letters --budget 2h
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    options = build_parser().parse_args(arguments)
    return report_errors(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    check_end(options)
    with open_start(options) as local:
        return _train(local)


def _train(options: argparse.Namespace) -> int:
    tokenizer = AlbertTokenizer.from_file(options.tokenizer / "tokenizer.json")
    recipe = changed_recipe(RECIPES[options.recipe], options)
    steps = options.steps or (recipe.num_steps if options.budget is None else None)
    config = make_config(options, recipe, tokenizer.vocab_size)
    record: dict[str, Any] = {
        "settings": {**asdict(recipe), "num_steps": steps, "budget_s": options.budget},
        "config": config.to_hf(),
        "corpus": corpus_record(options),
    }
    is_known_run(options.output, record)
    with join_world(options.device) as world:
        record["precision"] = run_precision(options.precision, options.output, world)
        job = make_job(options, config, recipe, world, record["precision"], num_steps=steps)
        return train_job(options, job, job.build(), record, program="training.pretrain")


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of this command."""
    parser = make_parser("training.pretrain", __doc__, _EXAMPLES)
    add_data(parser)
    add_sizes(parser)
    add_end(parser)
    how = parser.add_argument_group("training (defaults are the recipe's)")
    how.add_argument(
        "--recipe",
        choices=list(RECIPES),
        default="small",
        help="the paper's, or one for a few hours on a small machine (small)",
    )
    how.add_argument(
        "--start",
        choices=("local", "random"),
        help="initialization: attention to neighbours, or the paper's random weights",
    )
    add_recipe(how)
    add_reports(parser)
    add_machine(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
