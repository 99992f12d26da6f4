"""Finetuning of several tasks into one set of weights.

Each step trains one task, drawn by its --weights. `--pretraining` continues masked tokens and
sentence order, so that these tasks keep their accuracy while the shared layer changes. Writes
`checkpoints/`, of which `checkpoint` is the newest and `best` that of the best validation,
`metrics.jsonl` and `tensorboard/` into the output folder; the same command resumes a run that was
stopped. On several GPUs or hosts start it with torchrun.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from albert_serve.config import AlbertConfig
from training.conversion.source import REFERENCE_HELP, open_initial
from training.data.examples import MIN_LENGTH
from training.errors import report_errors
from training.evaluation.validation import Validation
from training.finetuning.classification import Classification, check_validation
from training.finetuning.feeds import build_streams, num_steps, steps_an_epoch, stream_weights
from training.finetuning.heads import label_config, place, record_of, selection_of, validation_of
from training.finetuning.options import (
    add_classification,
    add_hyperparameters,
    add_validation,
    parse,
    resolve,
)
from training.finetuning.pretraining import add_pretraining, check_order, mask_rates
from training.finetuning.questions import (
    add_questions,
    choose_head,
    conditioned_loss,
    with_question_length,
)
from training.finetuning.recipes import has_questions_alone
from training.finetuning.seeds import Trained, check_folder, seeds_of, train_seeds
from training.finetuning.start import changed_config, describe_attention, load_start
from training.loop.distributed import World, join_world, setting_up, share
from training.loop.progress import DivergedError, Progress, RunError, is_known_run
from training.loop.provenance import file_names
from training.loop.reproducibility import run_precision
from training.loop.step import Run
from training.losses import Objective
from training.model.checkpoint import read_config, read_tasks
from training.optim.optimizers import OptimizerSettings, Schedule, build_optimizers
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
  python -m training.finetune --initialize-from runs/sentiment/best --output runs/both \
      --text-classification sst2/train.tsv --labels negative positive \
      --head topic --text-classification news/train.csv --label-column category --steps 20000
  python -m training.finetune --initialize-from albert/albert-base-v2 --output runs/mood \
      --text-classification mood.tsv --labels bad good --steps 5000
  python -m training.finetune --initialize-from runs/mnli/best --output runs/rte \
      --task RTE --recipe paper --patience 5 --seeds 3
  python -m training.finetune --initialize-from albert/albert-base-v2 --output runs/race \
      --task RACE --data RACE --recipe paper
  torchrun --nproc-per-node 8 -m training.finetune --initialize-from runs/base/checkpoint \
      --output runs/mnli --task MNLI --recipe paper
"""
# Of the run's folder: all errors of the data, where they are more than are printed.
ERRORS_FILE: Final = "errors.txt"
# Options that a run may be resumed with other values of. Among them the size of micro-batches
# changes the dropout that is drawn, so that a run that lacks memory can go on with a smaller one.
_NOT_RECORDED: Final = frozenset(
    {
        *("output", "device", "save_every", "report_every", "keep", "seeds"),
        *("validation", "validate_every", "metric", "head", "micro_batch_size"),
    }
)


def _build(
    options: argparse.Namespace, precision: PrecisionName, world: World
) -> tuple[Run, dict[str, Any], Validation | None]:
    """Build the run, the keys of config.json that name its labels, and the validation."""
    hf = read_config(options.initialize_from)
    config = changed_config(
        AlbertConfig.from_hf(hf),
        max_positions=options.max_positions,
        dropout=options.dropout,
        classifier_dropout=options.classifier_dropout,
    )
    _check_length(options, config.max_positions)
    check_order(options, config.max_positions)
    rates = mask_rates(options)
    question_head = choose_head(options)
    if notice := describe_attention(config, world.device):
        print(notice)
    placed = place(options, read_tasks(options.initialize_from), hf)
    feeds, datasets, loss_of = build_streams(options, placed, config, precision, world)
    if question_head == "start-conditioned":
        loss_of["question-answering"] = conditioned_loss(compiles=should_compile(options))
    labels = {each.task: each.labels for each in datasets if isinstance(each, Classification)}
    progress = Progress(num_steps=num_steps(options, feeds), budget_s=options.budget)
    validation, selection = None, None
    if validated := [each for each in datasets if each.held_out]:
        every = options.validate_every or steps_an_epoch(feeds, "--validate-every")
        row_length = min(options.length, config.max_positions)
        validation = validation_of(validated, every=every, row_length=row_length)
        selection = selection_of(validated, options)
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
    model.to(world.device)
    run = Run(
        model=model,
        objective=Objective(model, world.device, loss_of),
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
        weights=stream_weights(options, feeds),
        loss_weights={
            "sentence-order": options.sentence_weight,
            "paired-order": options.sentence_weight,
        },
        clip_norm=options.clip_norm,
        seed=options.seed,
        world=world,
        progress=progress,
        precision=precision,
        selection=selection,
        mask_rates=rates,
    )
    task = {key: hf[key] for key in ("albert_sentence_task",) if key in hf}
    return run, {**task, **label_config(hf, model.tasks, placed, labels)}, validation


def _check_length(options: argparse.Namespace, max_positions: int) -> None:
    # Without --length, windows of questions have 384 tokens, or as many as the model has positions.
    if has_questions_alone(options) and options.question_length != options.length:
        return
    if not MIN_LENGTH <= options.length <= max_positions:
        raise RunError(
            f"--length {options.length}: a sequence has from {MIN_LENGTH} tokens to the model's "
            f"{max_positions} positions"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    options = parse(_parser(), arguments)
    return report_errors(lambda: _run(options), options.output / ERRORS_FILE)


def _run(options: argparse.Namespace) -> int:
    with join_world(options.device) as world:
        with setting_up(world):
            options = resolve(argparse.Namespace(**{**vars(options), "device": world.device}))
            check_folder(options)
            check_validation(options)
            options = with_question_length(options)
            if options.seeds is not None:
                seeds_of(options)  # checked before a run begins
        train = partial(_run_one, world=world)
        if options.seeds is not None:
            return train_seeds(options, train, is_main=world.is_main)
        trained = train(options)
        if trained.divergence is not None:
            raise trained.divergence
        return trained.status


def _run_one(options: argparse.Namespace, world: World) -> Trained:
    settings = {
        name: str(value) for name, value in vars(options).items() if name not in _NOT_RECORDED
    } | {"heads": record_of(options)}
    if len(options.label_column or ()) == 1:  # as runs record it that took only one
        settings["label_column"] = options.label_column[0]
    if options.precision == "auto":
        del settings["precision"]  # that of the run, if it is known
    with ExitStack() as stack:
        with setting_up(world):
            is_known_run(options.output, settings)
            local = stack.enter_context(open_initial(options))
        precision = run_precision(options.precision, options.output, world)
        return _train(local, {**settings, "precision": precision}, precision, world)


def _train(
    options: argparse.Namespace,
    settings: Mapping[str, str],
    precision: PrecisionName,
    world: World,
) -> Trained:
    with setting_up(world):
        run, extra_config, validation = _build(options, precision, world)
    trains_all = all(set(run.model.heads) == set(feed.tasks) for feed in run.feeds)
    run.objective = share(run.objective, run.model, world, "ddp", trains_all=trains_all)
    origin = Origin(
        program="training.finetune",
        stage={"settings": {**settings, **_data_names(options)}},
        tokenizer_from=options.initialize_from,
        extra_config=extra_config,
    )
    try:
        status = train_run(options, run, settings, origin, validation=validation)
    except DivergedError as error:
        # Its traceback would keep the whole run while another seed's is trained.
        return Trained(1, run.selection, precision, error.with_traceback(None))
    batches = ", ".join(f"{count:,} of {name}" for name, count in run.num_steps.items())
    print(f"{options.output / 'checkpoint'}: {run.progress.step:,} steps ({batches})")
    return Trained(status, run.selection, precision, signal=run.signal)


def _data_names(options: argparse.Namespace) -> dict[str, list[str]]:
    """Return the names of the data files without their folders."""
    classifiers = (options, *options.heads)
    return {
        "initialize_from": [options.initial_name],
        "data": file_names([each.data for each in classifiers if each.data is not None]),
        "text_classification": _names_of("text_classification", classifiers),
        "multiple_choice": file_names(options.multiple_choice),
        "validation": _names_of("validation", classifiers),
        "question_answering": file_names(options.question_answering),
        "pretraining": file_names(options.pretraining),
        "teacher": [] if options.teacher is None else file_names([Path(options.teacher)]),
    }


def _names_of(option: str, classifiers: Sequence[argparse.Namespace]) -> list[str]:
    return [name for each in classifiers for name in file_names(getattr(each, option))]


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
    add_pretraining(data)
    data.add_argument(
        "--weights",
        nargs="+",
        type=parse_positive,
        help="relative frequency of each task, in that order, further classifiers after the first "
        "(1)",
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
