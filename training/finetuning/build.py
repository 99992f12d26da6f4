"""A finetuning run, built from its settings."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from albert_serve.config import AlbertConfig
from albert_serve.files import sha256_of
from albert_serve.tokenizer import AlbertTokenizer
from training.data.corpus import find_files
from training.data.examples import MIN_LENGTH
from training.data.labelled.folders import CHOICES, files_of_split
from training.evaluation.metrics import LOWEST
from training.evaluation.validation import HEADS_MEAN, Validation
from training.finetuning.classification import ClassificationData
from training.finetuning.data import DataContext
from training.finetuning.model import label_config, load_start, new_classifiers, place
from training.finetuning.pretraining import check_order_length, mask_rates
from training.finetuning.probing import Probing
from training.finetuning.settings import FinetuneSettings
from training.finetuning.streams import Streams, TaskData
from training.loop.distributed import World
from training.loop.progress import Progress, RunError
from training.loop.provenance import file_names
from training.loop.selection import BestValidation
from training.loop.step import Mixture, Run
from training.model.checkpoint import read_config, read_tasks
from training.model.heads import AlbertForTasks, Task
from training.run.driver import build_run
from training.run.options import should_compile
from training.system.precision import PrecisionName


class _PreparedRun(NamedTuple):
    """A run whose data is read and whose model is loaded.

    Attributes:
        build: builds the run at step 0; all processes must call it together.
        extra_config: the keys of config.json that name its labels.
        probing: of the classifiers that are fitted before the first step.
    """

    build: Callable[[], Run]
    extra_config: Mapping[str, Any]
    validation: Validation | None
    probing: Probing | None


def prepare_finetuning(
    settings: FinetuneSettings, start: Path, precision: PrecisionName, world: World
) -> _PreparedRun:
    """Read the data and load the model of the settings' run.

    Args:
        start: folder of the initial checkpoint.

    Raises:
        CorpusError: data is broken; all of it is listed.
        RunError: options do not go together, or not with the checkpoint.
    """
    hf, stored = read_config(start), read_tasks(start)
    config = _architecture(settings, hf)
    placed = place(settings, stored, hf)
    context = DataContext(
        settings=settings,
        start=start,
        tokenizer=AlbertTokenizer.from_file(start / "tokenizer.json"),
        architecture=config,
        world=world,
        precision=precision,
        compiles=should_compile(settings.compile, world.device),
    )
    streams = Streams(context=context, placed=placed)
    streams.read()
    labels = {each.task: each.labels for each in streams.classifications}
    progress = Progress(num_steps=streams.num_steps, budget_s=settings.budget)
    validation, selection = None, None
    if validated := [each for each in streams.datasets if each.held_out]:
        every = streams.validation_interval
        row_length = min(settings.length, config.max_positions)
        validation = _validation_of(validated, every=every, row_length=row_length)
        selection = _selection_of(validated, settings)
    elif settings.patience or any(each.metric for each in settings.classifiers):
        raise RunError("--patience and --metric need held-out data; give --validation")
    torch.manual_seed(settings.seed)
    model = load_start(
        start,
        config,
        tuple(task for stream in streams.task_streams for task in stream.tasks),
        labels,
    )
    probing = _probing(model, streams, new_classifiers(start, labels))
    hyperparameters = settings.hyperparameters
    build = partial(
        build_run,
        model,
        Mixture(
            streams=streams.task_streams,
            weights=streams.weights,
            loss_weights=hyperparameters.loss_weights,
            mask_rates=mask_rates(settings),
        ),
        streams.loss_of,
        hyperparameters,
        progress=progress,
        world=world,
        precision=precision,
        selection=selection,
    )
    task = {key: hf[key] for key in ("albert_sentence_task",) if key in hf}
    return _PreparedRun(
        build, {**task, **label_config(hf, model.tasks, placed, labels)}, validation, probing
    )


def _probing(model: AlbertForTasks, streams: Streams, new: Collection[Task]) -> Probing | None:
    """Return the probing of the classifiers that are new, or with --head-only of all, if any.

    A teacher's logits are no labels to fit.
    """
    settings = streams.settings
    fitted = {
        each.task: each
        for each in streams.classifications
        if settings.teacher is None and (each.task in new or settings.head_only)
    }
    trained = {task for stream in streams.task_streams for task in stream.tasks}
    return Probing.of(model, fitted, trained) if fitted else None


def _architecture(settings: FinetuneSettings, hf: Mapping[str, Any]) -> AlbertConfig:
    """Return the sizes of the model.

    Raises:
        RunError: sequences are longer than its positions, or too short.
    """
    changes: dict[str, Any] = {
        "max_positions": settings.max_positions,
        "hidden_dropout": settings.dropout,
        "attention_dropout": settings.dropout,
        "classifier_dropout": settings.classifier_dropout,
    }
    chosen = {name: value for name, value in changes.items() if value is not None}
    config = replace(AlbertConfig.from_hf(hf), **chosen)
    # Without --length, windows of questions have 384 tokens, or as many as the model has positions.
    has_default = settings.has_questions_alone and settings.question_length != settings.length
    if not has_default and not MIN_LENGTH <= settings.length <= config.max_positions:
        raise RunError(
            f"--length {settings.length}: a sequence has from {MIN_LENGTH} tokens to the model's "
            f"{config.max_positions} positions"
        )
    check_order_length(settings, config.max_positions)
    return config


def _validation_of(datasets: Sequence[TaskData], *, every: int, row_length: int) -> Validation:
    """Return the validation on the held-out data of all."""
    each = [one.validation(every=every, row_length=row_length) for one in datasets]
    if len(each) == 1:
        return each[0]
    classifiers = [one for one in datasets if isinstance(one, ClassificationData)]
    return Validation(
        batches=[batch for one in each for batch in one.batches],
        every=every,
        tasks=tuple(one.task for one in classifiers),
        metrics={one.task: one.figures for one in classifiers},
        deciding={one.task: one.figure for one in classifiers},
    )


def _selection_of(datasets: Sequence[TaskData], settings: FinetuneSettings) -> BestValidation:
    """Return the selection of the best validation; of several classifiers by their mean.

    Raises:
        RunError: of a figure of several the lowest is the best.
    """
    figures = [one.figure for one in datasets]
    figure, chance = figures[0], datasets[0].chance
    if len(datasets) > 1:
        if lowest := [each for each in figures if each in LOWEST]:
            raise RunError(
                f"--metric {lowest[0]}: with several classifiers validated, the mean of their "
                "metrics decides, of which the highest is the best; take another"
            )
        chances = [one.chance for one in datasets if one.chance is not None]
        figure, chance = HEADS_MEAN, statistics.fmean(chances)
    if settings.splits_validation:
        files = [each.text_classification for each in settings.classifiers]
        part = f"{settings.validation_split:g} of "
    else:
        files, part = [each.validation for each in settings.classifiers], ""
    return BestValidation(
        figure=figure,
        chance=chance,
        measured="; ".join(
            _describe_held_out(figure, its, part)
            for figure, its in zip(figures, filter(None, files), strict=False)
        ),
        patience=settings.patience,
    )


def _describe_held_out(figure: str, held_out: Sequence[Path], part: str) -> str:
    """Describe a figure of held-out files, or of a part of them, by their names and content."""
    hashes = "".join(sha256_of(file) for path in held_out for file in _files_at(path))
    content = hashlib.sha256(hashes.encode()).hexdigest()[:12]
    return f"{figure} of {part}{', '.join(file_names(held_out))} (content {content})"


def _files_at(path: Path) -> list[Path]:
    """Return a file, or those of a folder: the held-out ones if its names tell splits."""
    of_split = files_of_split(path, "validation", suffixes=CHOICES) if path.is_dir() else []
    return of_split or find_files([path])
