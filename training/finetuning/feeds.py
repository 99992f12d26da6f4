"""The task streams of a finetuning run: its data, their batch sizes and weights, and the losses."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple

from albert_serve.config import AlbertConfig
from albert_serve.tokenizer import AlbertTokenizer
from training.data.choices import choice_feed
from training.data.feeds import Division, ExampleFeed, Feed, example_feed
from training.data.labelled.errors import collecting, raise_listed
from training.errors import EvaluationError
from training.finetuning.choices import build_choices
from training.finetuning.classification import Classification, build_classification
from training.finetuning.heads import Measured, Placed
from training.finetuning.held_out import build_held_out_questions
from training.finetuning.pretraining import check_pretraining, pretraining_feeds
from training.finetuning.questions import question_examples
from training.loop.distributed import World
from training.loop.progress import RunError
from training.losses import LOSS_OF, LossFunction, compiled_losses
from training.order_losses import order_loss
from training.run.options import should_compile
from training.system.precision import PrecisionName

# The data of other tasks than classifiers', in the order of --weights and --batch-size.
_DATA_OPTIONS: Final = ("multiple_choice", "question_answering", "pretraining")


class Streams(NamedTuple):
    """The task streams of a run.

    Attributes:
        feeds: in the order of --weights.
        datasets: those that may have held-out data.
        loss_of: the loss function of each loss.
    """

    feeds: list[Feed]
    datasets: list[Measured]
    loss_of: dict[str, LossFunction]


def build_streams(
    options: argparse.Namespace,
    placed: Sequence[Placed],
    config: AlbertConfig,
    precision: PrecisionName,
    world: World,
) -> Streams:
    """Read the data of all tasks and return their streams.

    Raises:
        CorpusError: data is broken; all of it is listed.
        RunError: there is none, or options do not go together.
    """
    tokenizer = AlbertTokenizer.from_file(options.initialize_from / "tokenizer.json")
    feeds: list[Feed] = []
    compiles = should_compile(options)
    sizes = _batch_sizes(options, placed)
    division = Division(
        micro_batch_size=options.micro_batch_size,
        rank=world.rank,
        world_size=world.size,
        by_length=world.device.type == "cpu",
    )
    datasets: list[Measured] = []
    if options.teacher is not None and not options.text_classification:
        raise RunError("--teacher labels texts; give them with --text-classification")
    make = partial(example_feed, config=config, seed=options.seed, division=division)
    errors: list[str] = []  # of all data, to be listed at once
    for task, _, own in placed:
        with collecting(errors):
            texts = build_classification(task, own, tokenizer, precision, world, compiles=compiles)
            datasets.append(texts)
            feeds.append(make(task, texts.examples, batch_size=sizes[task]))
    if options.multiple_choice:
        with collecting(errors):
            choices = build_choices(options, tokenizer)
            datasets.append(choices)
            feeds.append(
                choice_feed(
                    choices.examples,
                    tokenizer,
                    config,
                    batch_size=sizes["multiple-choice"],
                    seed=options.seed,
                    division=division,
                )
            )
    if options.question_answering:
        with collecting(errors):
            questions = question_examples(options, tokenizer, max_positions=config.max_positions)
            size = sizes["question-answering"]
            feeds.append(make("question-answering", questions, batch_size=size))
        if options.validation and not (placed or options.multiple_choice):
            with collecting(errors, EvaluationError):
                held_out = build_held_out_questions(
                    options, tokenizer, max_positions=config.max_positions
                )
                datasets.append(held_out)
    if options.pretraining:
        with collecting(errors):
            if errors:
                check_pretraining(options, world)
            else:
                feeds += pretraining_feeds(
                    options,
                    tokenizer,
                    sizes["pretraining"],
                    world,
                    max_positions=config.max_positions,
                )
    raise_listed(errors)
    if not feeds:
        raise RunError(
            "nothing to train: give --text-classification, --multiple-choice, --task, --head, "
            "--question-answering or --pretraining"
        )
    loss_of = compiled_losses() if compiles else dict(LOSS_OF)
    loss_of |= {each.task: each.loss for each in datasets if isinstance(each, Classification)}
    if options.order_share:
        loss_of["sentence-order"] = order_loss(compiles=compiles)
    return Streams(feeds, datasets, loss_of)


def _batch_sizes(options: argparse.Namespace, placed: Sequence[Placed]) -> dict[str, int]:
    """Return the examples a step of each task stream by its name, in the order of --weights."""
    others = [name for name in _DATA_OPTIONS if getattr(options, name)]
    names = [each.task for each in placed] + [name.replace("_", "-") for name in others]
    sizes = options.batch_size
    if len(sizes) not in (1, len(names)):
        raise RunError(
            f"--batch-size {' '.join(map(str, sizes))}: give one number, or one for each of "
            + ", ".join(names)
        )
    return dict(zip(names, sizes * len(names) if len(sizes) == 1 else sizes, strict=True))


def stream_weights(options: argparse.Namespace, feeds: Sequence[Feed]) -> list[float]:
    """Return the weight of each task stream; those of pretraining share one by --order-share."""
    names = [feed.name for feed in feeds][: -1 if options.order_share else None]
    weights = options.weights or [1.0] * len(names)
    if len(weights) != len(names):
        raise RunError(f"--weights {weights}: give one for each of {', '.join(names)}")
    if not options.order_share:
        return list(weights)
    *others, pretraining = weights
    share = options.order_share
    return [*others, pretraining * (1 - share), pretraining * share]


def num_steps(options: argparse.Namespace, feeds: Sequence[Feed]) -> int | None:
    """Return the steps of the run by --steps and --epochs; None if its budget alone ends it."""
    steps: int | None = options.steps
    if not options.epochs:
        return steps
    in_epochs: int = math.ceil(options.epochs * steps_an_epoch(feeds, "--steps"))
    return min(in_epochs, steps or in_epochs)


def steps_an_epoch(feeds: Sequence[Feed], option: str) -> int:
    """Return the steps in which the one task's examples are read once.

    Raises:
        RunError: there are several tasks.
    """
    match feeds:
        case [ExampleFeed() as feed]:
            return feed.steps_an_epoch
    raise RunError(f"epochs are those of one task; with several tasks give {option}")
