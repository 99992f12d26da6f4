"""Distil an encoder of `transformers` (BERT, RoBERTa, MiniLM, ELECTRA) into an ALBERT.

The student learns masked tokens as in pretraining, and at each word the teacher's hidden states of
chosen layers. The teacher reads the text unmasked. Different tokenizers are aligned by the
characters of words. With `--start teacher` the student starts from
the teacher's embeddings and one of its layers. Writes the files of albert-serve pretrain; the same
command resumes a run that was stopped.

A finetuned teacher's logits label texts for albert-serve finetune (--teacher).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Final

from training.distillation.job import DistilConfig as DistilConfig
from training.distillation.job import DistillationJob, TeacherSetup, student_sizes
from training.distillation.teacher import load_teacher
from training.errors import report_errors
from training.loop.driver import TrainedRun
from training.options.flags import add_flags, read_flags
from training.options.tables import naming_tables
from training.pretraining.config import architecture, open_start
from training.pretraining.job import run_job
from training.pretraining.recipes import DISTILLATION
from training.system.command_line import make_parser

_EXAMPLES: Final = r"""examples:
  albert-serve distil --teacher sentence-transformers/all-MiniLM-L6-v2 \
      --corpus wiki/*.jsonl.xz --tokenizer vocab/ --output runs/student \
      --embedding-size 256 --budget 2h --validation held-out.jsonl
  albert-serve distil --teacher roberta-base --initialize-from runs/base/checkpoint \
      --shards wiki-shards/ --tokenizer vocab/ --output runs/taught --budget 8h
"""


@naming_tables()
def distil(config: DistilConfig) -> TrainedRun:
    """Distil a teacher into a student to the end of the run, or resume it.

    Raises:
        TrainingError, AlbertServeError, OSError: the run cannot be started or go on.
    """
    recipe = config.changed(DISTILLATION)
    with open_start(config) as start:
        teacher = load_teacher(config.teacher, config.device)
        defaults = student_sizes(config, recipe, teacher)
        sizes = architecture(config, recipe, start, start.open_tokenizer(), defaults)
        teaching = TeacherSetup.choose(config, recipe, sizes, teacher)
        return run_job(
            config,
            recipe,
            sizes,
            start,
            program="albert-serve distil",
            make=partial(DistillationJob, teaching=teaching),
            further_settings=teaching.settings(),
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    parser = make_parser("albert-serve distil", __doc__, _EXAMPLES)
    add_flags(parser, DistilConfig)
    values = parser.parse_args(arguments)
    return report_errors(lambda: distil(read_flags(DistilConfig, values)).status)


if __name__ == "__main__":
    sys.exit(main())
