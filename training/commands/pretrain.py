"""Pretrain a model on text: masked n-grams and sentence order (Lan et al. 2019, section 3.1).

The output folder gets `checkpoints/` (Hugging Face directories), `checkpoint` (the newest),
`metrics.jsonl` and `tensorboard/`. To resume an interrupted run, repeat the command. For several
GPUs or hosts, start it with torchrun.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from albert_serve.terminal import make_parser
from training.errors import report_errors
from training.loop.driver import TrainedRun
from training.options.flags import add_flags, read_flags
from training.options.tables import naming_tables
from training.pretraining.config import PretrainConfig as PretrainConfig
from training.pretraining.config import architecture, open_start
from training.pretraining.job import run_job
from training.pretraining.recipes import RECIPES

_EXAMPLES: Final = r"""examples:
  albert-serve pretrain --corpus wiki/*.jsonl.xz --tokenizer vocab/ --output runs/base \
      --preset base --recipe paper
  albert-serve pretrain --shards wiki-shards/ --tokenizer vocab/ --output runs/small \
      --preset small --recipe small --budget 2h --validation held-out.jsonl
  torchrun --nproc-per-node 8 --no-python albert-serve pretrain --shards wiki-shards/ \
      --tokenizer vocab/ --output runs/xxlarge --preset xxlarge --recipe paper --recompute
  albert-serve pretrain --initialize-from albert/albert-base-v2 --corpus letters/ \
      --output runs/letters --budget 2h
"""


@naming_tables()
def pretrain(config: PretrainConfig) -> TrainedRun:
    """Pretrain a model to the end of its run, or resume it.

    Raises:
        TrainingError, AlbertServeError, OSError: the run cannot start or continue.
    """
    recipe = config.changed(RECIPES[config.recipe])
    with open_start(config) as start:
        sizes = architecture(config, recipe, start, start.open_tokenizer())
        return run_job(config, recipe, sizes, start)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit status."""
    parser = make_parser("albert-serve pretrain", __doc__, _EXAMPLES)
    add_flags(parser, PretrainConfig)
    values = parser.parse_args(arguments)
    return report_errors(lambda: pretrain(read_flags(PretrainConfig, values)).status)


if __name__ == "__main__":
    sys.exit(main())
