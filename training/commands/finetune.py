"""Finetune a model on one or several tasks.

Each step trains one task, drawn by --weights. --pretraining continues masked tokens and sentence
order, so that these tasks keep their accuracy. The output folder gets `checkpoints/`,
`checkpoint` (the newest), `best` (of the best validation), `metrics.jsonl` and `tensorboard/`. To
resume an interrupted run, repeat the command. For several GPUs or hosts, start it with torchrun.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from albert_serve.terminal import make_parser
from training.errors import report_errors
from training.finetuning.classifiers import ClassifierConfig as ClassifierConfig
from training.finetuning.config import FinetuneConfig as FinetuneConfig
from training.finetuning.run import run_finetuning
from training.loop.driver import TrainedRun
from training.options.flags import add_flags, read_flags
from training.options.heads import add_heads, parse_with_heads, read_heads
from training.options.tables import naming_tables

_EXAMPLES: Final = r"""examples:
  albert-serve finetune --initialize-from runs/base/checkpoint --output runs/sentiment \
      --text-classification sst2/train.tsv --labels negative positive --steps 20000
  albert-serve finetune --initialize-from runs/base/checkpoint --output runs/tasks \
      --text-classification sst2/train.tsv --labels negative positive \
      --question-answering squad/train-v1.1.json --pretraining wiki/*.jsonl.xz \
      --weights 1 2 1 --budget 30m
  albert-serve finetune --initialize-from runs/sentiment/best --output runs/both \
      --text-classification sst2/train.tsv --labels negative positive \
      --head topic --text-classification news/train.csv --label-column category --steps 20000
  albert-serve finetune --initialize-from albert/albert-base-v2 --output runs/mood \
      --text-classification mood.tsv --labels bad good --steps 5000
  albert-serve finetune --initialize-from runs/mnli/best --output runs/rte \
      --task RTE --recipe paper --patience 5
  albert-serve finetune --initialize-from albert/albert-base-v2 --output runs/race \
      --task RACE --data RACE --recipe paper
  albert-serve finetune --initialize-from albert/albert-base-v2 --output runs/names \
      --token-classification train.conll --validation dev.conll
  albert-serve finetune --initialize-from runs/base/checkpoint --output runs/vectors \
      --embeddings pairs.csv --steps 2000
  torchrun --nproc-per-node 8 --no-python albert-serve finetune \
      --initialize-from runs/base/checkpoint --output runs/mnli --task MNLI --recipe paper
"""


@naming_tables()
def finetune(config: FinetuneConfig) -> TrainedRun:
    """Finetune a checkpoint to the end of the run, or resume it.

    Raises:
        TrainingError, AlbertServeError, OSError: the run cannot start or continue.
    """
    return run_finetuning(config)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit status."""
    parser = make_parser("albert-serve finetune", __doc__, _EXAMPLES)
    add_flags(parser, FinetuneConfig)
    add_heads(parser)
    values, heads = parse_with_heads(parser, ClassifierConfig, arguments)

    def run() -> int:
        named_heads = read_heads(ClassifierConfig, heads)
        return finetune(read_flags(FinetuneConfig, values, heads=named_heads)).status

    return report_errors(run)


if __name__ == "__main__":
    sys.exit(main())
