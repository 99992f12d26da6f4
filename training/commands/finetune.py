"""Finetuning of several tasks into one set of weights.

Each step trains one task, drawn by its --weights. `--pretraining` continues masked tokens and
sentence order, so that these tasks keep their accuracy while the shared layer changes. Writes
`checkpoints/`, of which `checkpoint` is the newest and `best` that of the best validation,
`metrics.jsonl` and `tensorboard/` into the output folder; the same command resumes a run that was
stopped. On several GPUs or hosts start it with torchrun.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Final

import torch

from albert_serve.config import AlbertConfig
from albert_serve.tasks.text_length import describe_long_texts
from training.conversion.source import open_checkpoint
from training.errors import report_errors
from training.finetuning.build import (
    build_run,
    check_run,
    labelled_of,
    load_model,
    probing_of,
)
from training.finetuning.config import ClassifierConfig as ClassifierConfig
from training.finetuning.config import FinetuneConfig as FinetuneConfig
from training.finetuning.embeddings import VECTORS
from training.finetuning.model import label_config
from training.finetuning.recipes import default_rate
from training.finetuning.settings import record_of, settle
from training.finetuning.start import Start
from training.finetuning.tasks import FinetuningTask, TextTask, read_tasks
from training.finetuning.validation import export_command, validating
from training.loop.checkpointing import Checkpoints
from training.loop.distributed import join_world, setting_up
from training.loop.driver import TrainedRun, train_run
from training.loop.progress import is_known_run
from training.loop.reproducibility import run_precision
from training.loop.step import Run
from training.model.checkpoint import read_config
from training.model.heads import AlbertForTasks
from training.model.provenance import file_names
from training.options.device import should_compile
from training.options.flags import add_flags, read_flags
from training.options.heads import add_heads, parse_with_heads, read_heads
from training.options.tables import naming_tables
from training.system.command_line import make_parser

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
        TrainingError, AlbertServeError, OSError: the run cannot be started or go on.
    """
    with join_world(config.device) as world, ExitStack() as stack:
        with setting_up(world):
            has_default_rate = config.lr is None and config.recipe is None
            config = settle(config)
            checkpoint = stack.enter_context(open_checkpoint(config.initialize_from))
            folder = checkpoint.folder
            if has_default_rate:
                hidden_size = AlbertConfig.from_hf(read_config(folder)).hidden_size
                config = replace(config, lr=default_rate(hidden_size))
            record = record_of(config)
            is_known_run(config.output, record)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        precision = record["precision"] = run_precision(config.precision, config.output, world)
        with setting_up(world):
            compiles = should_compile(config.compile, world.device)
            config = replace(config, precision=precision, compile=compiles)
            start = Start.open(folder, config)
            tasks = read_tasks(config, start, world)
            validation, selection = validating(tasks, config, start.architecture)
            check_run(tasks, config)
            model = load_model(start, tasks, config)
            probing = probing_of(model, start, tasks, config)
        if probing is not None and not (config.output / "checkpoint").exists():
            probing.fit(world, precision)
        run = build_run(model, tasks, config, world, selection)
        trained = train_run(
            config,
            run,
            record,
            program="albert-serve finetune",
            stage={"settings": {**record, **_data_names(config, checkpoint.name)}},
            start=folder,
            tokenizer_from=folder,
            extra_config=_extra_config(start, model, tasks),
            sentence_vectors=VECTORS if config.embeddings else None,
            validation=validation,
            validates_start=probing is not None,
            compiles=compiles,
        )
        if trained.status == 0 and world.is_main and not _has_best(run):
            Checkpoints(folder=config.output, num_kept=config.keep).link_best(trained.num_steps)
        print(f"{trained.checkpoint}: {trained.num_steps:,} steps")
        counts = [task.long_texts for task in tasks if isinstance(task, TextTask)]
        if num_long := sum(count.num_long for count in counts):
            num_texts = sum(count.num_texts for count in counts)
            print(describe_long_texts(num_long, num_texts, config.length, truncation=True))
        if trained.status == 0 and (command := export_command(config)):
            print(f"to export and measure it on the validation files: {command}")
        return trained


def _has_best(run: Run) -> bool:
    """Whether a validation of the run, or of its part before a resumption, selected the best."""
    is_selected = run.selection is not None and run.selection.best_step is not None
    return is_selected or bool(run.earlier_selection)


def _extra_config(
    start: Start, model: AlbertForTasks, tasks: Sequence[FinetuningTask]
) -> dict[str, Any]:
    """Return the keys of config.json that name the sentence task and the labels."""
    sentence_task = {key: start.hf[key] for key in ("albert_sentence_task",) if key in start.hf}
    return {**sentence_task, **label_config(start, model.tasks, labelled_of(tasks))}


def _data_names(config: FinetuneConfig, start: str) -> dict[str, list[str]]:
    """Return the names of the data files without their folders."""
    heads = config.classifiers
    return {
        "initialize_from": [start],
        "data": file_names([head.data for head in heads if head.data is not None]),
        "text_classification": file_names(
            [file for head in heads for file in head.text_classification]
        ),
        "multiple_choice": file_names(config.multiple_choice),
        "validation": file_names([file for head in heads for file in head.validation]),
        "token_classification": file_names(config.token_classification),
        "question_answering": file_names(config.question_answering),
        "embeddings": file_names(config.embeddings),
        "pretraining": file_names(config.pretraining),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    parser = make_parser("albert-serve finetune", __doc__, _EXAMPLES)
    add_flags(parser, FinetuneConfig)
    add_heads(parser)
    values, heads = parse_with_heads(parser, ClassifierConfig, arguments)

    def run() -> int:
        further = read_heads(ClassifierConfig, heads)
        return finetune(read_flags(FinetuneConfig, values, heads=further)).status

    return report_errors(run)


if __name__ == "__main__":
    sys.exit(main())
