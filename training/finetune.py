"""Finetuning of several tasks into one set of weights.

Each step trains one task, drawn by its --weights. `--pretraining` continues masked tokens and
sentence order, so that these tasks keep their accuracy while the shared layer changes. Writes
`checkpoints/`, of which `checkpoint` is the newest and `best` that of the best validation,
`metrics.jsonl` and `tensorboard/` into the output folder; the same command resumes a run that was
stopped.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from albert_serve.config import AlbertConfig
from albert_serve.tokenizer import AlbertTokenizer
from training.conversion.source import REFERENCE_HELP, open_initial
from training.data.choices import choice_feed
from training.data.collate import Collator, Slicing
from training.data.examples import MIN_LENGTH, ExampleSettings
from training.data.feeds import ExampleFeed, Feed, PlannedFeed, example_feed
from training.data.masking import NgramMasking, word_starts
from training.data.packing import Plan
from training.errors import report_errors
from training.evaluation.validation import Validation
from training.finetuning.choices import Choices, build_choices
from training.finetuning.classification import (
    Classification,
    build_classification,
    check_validation,
)
from training.finetuning.options import (
    add_classification,
    add_hyperparameters,
    add_validation,
    resolve,
)
from training.finetuning.questions import (
    add_questions,
    choose_head,
    conditioned_loss,
    question_examples,
)
from training.finetuning.seeds import Trained, check_folder, train_seeds
from training.finetuning.start import changed_config, load_start
from training.loop.distributed import World, join_world
from training.loop.progress import Progress, RunError, is_known_run
from training.loop.provenance import file_names
from training.loop.reproducibility import run_precision
from training.loop.step import Run
from training.losses import (
    LOSS_OF,
    LossFunction,
    Objective,
    compiled_losses,
)
from training.model.checkpoint import label_keys, read_config
from training.optim.optimizers import OptimizerSettings, Schedule, build_optimizers
from training.prepare import prepare
from training.run.driver import Origin, train_run
from training.run.options import (
    add_choices,
    add_compile,
    add_end,
    add_reports,
    parse_count,
    parse_positive,
    should_compile,
)
from training.system.command_line import make_parser
from training.system.precision import PrecisionName

_EXAMPLES: Final = r"""examples:
  python -m training.finetune --initialize-from runs/base/checkpoint --output runs/sentiment \
      --text-classification sst2/train.tsv --labels negative positive --steps 20000
  python -m training.finetune --initialize-from runs/base/checkpoint --output runs/tasks \
      --text-classification sst2/train.tsv --labels negative positive \
      --question-answering squad/train-v1.1.json --pretraining wiki/*.jsonl.xz \
      --weights 1 2 1 --budget 30m
  python -m training.finetune --initialize-from albert/albert-base-v2 --output runs/mood \
      --text-classification mood.tsv --labels bad good --steps 5000
  python -m training.finetune --initialize-from runs/mnli/best --output runs/rte \
      --task RTE --recipe paper --patience 5 --seeds 3
  python -m training.finetune --initialize-from albert/albert-base-v2 --output runs/race \
      --task RACE --data RACE --recipe paper
"""
# The tasks' data, in the order of --weights and --batch-size.
_DATA_OPTIONS: Final = (
    "text_classification",
    "multiple_choice",
    "question_answering",
    "pretraining",
)
# Options that do not affect the results.
_NOT_RECORDED: Final = frozenset(
    {
        *("output", "device", "save_every", "report_every", "keep", "seeds"),
        *("validation", "validate_every", "metric"),
    }
)


def _build(
    options: argparse.Namespace, precision: PrecisionName
) -> tuple[Run, dict[str, Any], Validation | None]:
    """Build the run, the keys of config.json that name its labels, and the validation."""
    check_validation(options)
    hf = read_config(options.initialize_from)
    config = changed_config(
        AlbertConfig.from_hf(hf),
        max_positions=options.max_positions,
        dropout=options.dropout,
        classifier_dropout=options.classifier_dropout,
    )
    _check_length(options.length, config.max_positions)
    question_head = choose_head(options)
    feeds, texts, loss_of = _feeds(options, config, precision)
    if question_head == "start-conditioned":
        loss_of["question-answering"] = conditioned_loss(compiles=should_compile(options))
    labels = {} if texts is None else texts.labels
    progress = Progress(num_steps=_num_steps(options, feeds), budget_s=options.budget)
    validation, selection = None, None
    if texts is not None and texts.held_out:
        every = options.validate_every or _steps_an_epoch(feeds, "--validate-every")
        validation = texts.validation(every=every, row_length=options.length)
        selection = texts.selection(options)
    torch.manual_seed(options.seed)
    tasks = tuple(task for feed in feeds for task in feed.tasks)
    model = load_start(
        options.initialize_from,
        config,
        tasks,
        labels,
        has_exits=options.adaptive_depth,
        question_head=question_head,
    )
    model.to(options.device)
    run = Run(
        model=model,
        objective=Objective(model, options.device, loss_of),
        optimizers=build_optimizers(
            model,
            OptimizerSettings(
                name=options.optimizer,
                lr=options.lr,
                adamw_lr=options.adamw_lr,
                pooled_factor=1.0,
                weight_decay=options.weight_decay,
            ),
            precision,
        ),
        schedule=Schedule(kind=options.schedule, warmup=options.warmup, decay=options.decay),
        feeds=feeds,
        weights=_weights(options, feeds),
        loss_weights={"sentence-order": options.sentence_weight},
        clip_norm=options.clip_norm,
        seed=options.seed,
        world=World(device=options.device),
        progress=progress,
        precision=precision,
        selection=selection,
    )
    has_labels = "text-classification" in model.tasks
    kept = {key: hf[key] for key in label_keys([]) if key in hf and has_labels}
    task = {key: hf[key] for key in ("albert_sentence_task",) if key in hf}
    return run, {**task, **(labels or kept)}, validation


def _check_length(length: int, max_positions: int) -> None:
    if not MIN_LENGTH <= length <= max_positions:
        raise RunError(
            f"--length {length}: a sequence has from {MIN_LENGTH} tokens to the model's "
            f"{max_positions} positions"
        )


def _feeds(
    options: argparse.Namespace, config: AlbertConfig, precision: PrecisionName
) -> tuple[list[Feed], Classification | Choices | None, dict[str, LossFunction]]:
    """Return the task streams in the order of --weights, the labelled data, and the losses."""
    tokenizer = AlbertTokenizer.from_file(options.initialize_from / "tokenizer.json")
    feeds: list[Feed] = []
    compiles = should_compile(options)
    sizes = _batch_sizes(options)
    texts: Classification | Choices | None = None
    if options.teacher is not None and not options.text_classification:
        raise RunError("--teacher labels texts; give them with --text-classification")
    if options.adaptive_depth and not options.text_classification:
        raise RunError("--adaptive-depth is of text classification; give --text-classification")
    if options.text_classification:
        texts = build_classification(options, tokenizer, precision, compiles=compiles)
        feeds.append(
            example_feed(
                "text-classification",
                texts.examples,
                config,
                batch_size=sizes["text_classification"],
                seed=options.seed,
            )
        )
    if options.multiple_choice:
        texts = build_choices(options, tokenizer)
        feeds.append(
            choice_feed(
                texts.examples,
                tokenizer,
                config,
                batch_size=sizes["multiple_choice"],
                seed=options.seed,
            )
        )
    if options.question_answering:
        feeds.append(
            example_feed(
                "question-answering",
                question_examples(options, tokenizer),
                config,
                batch_size=sizes["question_answering"],
                seed=options.seed,
            )
        )
    if options.pretraining:
        feeds.append(_pretraining(options, tokenizer, sizes["pretraining"]))
    if not feeds:
        raise RunError(
            "nothing to train: give --text-classification, --multiple-choice, --task, "
            "--question-answering or --pretraining"
        )
    loss_of = compiled_losses() if compiles else dict(LOSS_OF)
    if isinstance(texts, Classification):
        loss_of["text-classification"] = texts.loss
    return feeds, texts, loss_of


def _batch_sizes(options: argparse.Namespace) -> dict[str, int]:
    """Return the examples a step of each task with data, by the option that names its data."""
    names = [name for name in _DATA_OPTIONS if getattr(options, name)]
    sizes = options.batch_size
    if len(sizes) not in (1, len(names)):
        raise RunError(
            f"--batch-size {' '.join(map(str, sizes))}: give one number, or one for each of "
            + ", ".join(name.replace("_", "-") for name in names)
        )
    return dict(zip(names, sizes * len(names) if len(sizes) == 1 else sizes, strict=True))


def _weights(options: argparse.Namespace, feeds: Sequence[Feed]) -> list[float]:
    weights = options.weights or [1.0] * len(feeds)
    if len(weights) != len(feeds):
        names = ", ".join(feed.name for feed in feeds)
        raise RunError(f"--weights {weights}: give one for each of {names}")
    return list(weights)


def _num_steps(options: argparse.Namespace, feeds: Sequence[Feed]) -> int | None:
    """Return the steps of the run by --steps and --epochs; None if its budget alone ends it."""
    steps: int | None = options.steps
    if not options.epochs:
        return steps
    in_epochs: int = math.ceil(options.epochs * _steps_an_epoch(feeds, "--steps"))
    return min(in_epochs, steps or in_epochs)


def _steps_an_epoch(feeds: Sequence[Feed], option: str) -> int:
    """Return the steps in which the one task's examples are read once.

    Raises:
        RunError: there are several tasks.
    """
    match feeds:
        case [ExampleFeed() as feed]:
            return feed.steps_an_epoch
    raise RunError(f"epochs are those of one task; with several tasks give {option}")


def _pretraining(
    options: argparse.Namespace, tokenizer: AlbertTokenizer, num_rows: int
) -> PlannedFeed:
    tokenizer_file = options.initialize_from / "tokenizer.json"
    shards = prepare(options.pretraining, tokenizer_file, options.output / "shards")
    masking = NgramMasking(word_starts=word_starts(tokenizer))
    return PlannedFeed(
        plan=Plan(shards=shards, settings=_example_settings(options), seed=options.seed),
        collate=Collator(shards=shards, masking=masking, length=options.length, seed=options.seed),
        slicing=Slicing(num_rows=num_rows, rows_a_batch=num_rows),
    )


def _example_settings(options: argparse.Namespace) -> ExampleSettings:
    """Return the settings with the sentence task of the checkpoint's pretraining."""
    task = read_config(options.initialize_from).get("albert_sentence_task")
    return ExampleSettings(length=options.length, sentence_task="nsp" if task == "nsp" else "sop")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    options = _parser().parse_args(arguments)
    return report_errors(lambda: _run(resolve(options)))


def _run(options: argparse.Namespace) -> int:
    check_folder(options)
    with join_world(options.device) as world:
        if world.size > 1:
            raise RunError("finetuning runs in one process; begin it without torchrun")
        train = partial(_run_one, world=world)
        return train(options).status if options.seeds is None else train_seeds(options, train)


def _run_one(options: argparse.Namespace, world: World) -> Trained:
    settings = {
        name: str(value) for name, value in vars(options).items() if name not in _NOT_RECORDED
    }
    if len(options.label_column or ()) == 1:  # as runs record it that took only one
        settings["label_column"] = options.label_column[0]
    precision = run_precision(options.precision, options.output, world)
    with open_initial(options) as local:
        return _train(local, {**settings, "precision": precision}, precision)


def _train(
    options: argparse.Namespace, settings: Mapping[str, str], precision: PrecisionName
) -> Trained:
    is_known_run(options.output, settings)
    run, extra_config, validation = _build(options, precision)
    origin = Origin(
        program="training.finetune",
        stage={"settings": {**settings, **_data_names(options)}},
        tokenizer_from=options.initialize_from,
        extra_config=extra_config,
    )
    status = train_run(options, run, settings, origin, validation=validation)
    batches = ", ".join(f"{count:,} of {name}" for name, count in run.num_steps.items())
    print(f"{options.output / 'checkpoint'}: {run.progress.step:,} steps ({batches})")
    return Trained(status, run.selection, precision)


def _data_names(options: argparse.Namespace) -> dict[str, list[str]]:
    """Return the names of the data files without their folders."""
    return {
        "initialize_from": [options.initial_name],
        "data": [] if options.data is None else file_names([options.data]),
        "text_classification": file_names(options.text_classification),
        "multiple_choice": file_names(options.multiple_choice),
        "validation": file_names(options.validation),
        "question_answering": file_names(options.question_answering),
        "pretraining": file_names(options.pretraining),
        "teacher": [] if options.teacher is None else file_names([Path(options.teacher)]),
    }


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("training.finetune", __doc__, _EXAMPLES)
    add = parser.add_argument
    add("--initialize-from", required=True, metavar="CHECKPOINT", help=REFERENCE_HELP)
    add("--output", type=Path, required=True, help="the run's folder")
    data = parser.add_argument_group("data (at least one)")
    add_classification(data)
    add_choices(data)
    add_validation(data)
    add_questions(data)
    data.add_argument("--pretraining", nargs="+", type=Path, help="text for continued pretraining")
    data.add_argument(
        "--weights",
        nargs="+",
        type=parse_positive,
        help="relative frequency of each task, in that order (1)",
    )
    add_end(parser).add_argument(
        "--epochs", type=parse_positive, help="passes over the examples, of one task"
    )
    how = parser.add_argument_group("training")
    how.add_argument(
        "--max-positions", type=parse_count, help="drop positions that pretraining never used"
    )
    how.add_argument(
        "--truncation",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="cut longer texts to --length; with --no-truncation they are an error",
    )
    add_hyperparameters(how)
    add_compile(how, default=False)
    add_reports(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
