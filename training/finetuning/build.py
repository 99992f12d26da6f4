"""A finetuning run, built from its settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from albert_serve.config import AlbertConfig
from albert_serve.tokenizer import AlbertTokenizer
from training.data.examples import MIN_LENGTH
from training.evaluation.validation import Validation
from training.finetuning.data import DataContext
from training.finetuning.model import changed_config, label_config, load_start, place
from training.finetuning.pretraining import check_order_length, mask_rates
from training.finetuning.questions import choose_head
from training.finetuning.settings import FinetuneSettings
from training.finetuning.streams import Streams
from training.finetuning.validating import selection_of, validation_of
from training.loop.distributed import World
from training.loop.progress import Progress, RunError
from training.loop.step import Mixture, Run
from training.model.checkpoint import read_config, read_tasks
from training.run.driver import build_run
from training.run.options import should_compile
from training.system.precision import PrecisionName


class _PreparedRun(NamedTuple):
    """A run whose data is read and whose model is loaded.

    Attributes:
        build: builds the run at step 0; all processes must call it together.
        extra_config: the keys of config.json that name its labels.
    """

    build: Callable[[], Run]
    extra_config: Mapping[str, Any]
    validation: Validation | None


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
    question_head = choose_head(settings.question_head, stored)
    streams = Streams(context=context, placed=placed, question_head=question_head)
    streams.read()
    labels = {each.task: each.labels for each in streams.classifications}
    progress = Progress(num_steps=streams.num_steps, budget_s=settings.budget)
    validation, selection = None, None
    if validated := [each for each in streams.datasets if each.held_out]:
        every = settings.validate_every or streams.steps_an_epoch("--validate-every")
        row_length = min(settings.length, config.max_positions)
        validation = validation_of(validated, every=every, row_length=row_length)
        selection = selection_of(validated, settings)
    torch.manual_seed(settings.seed)
    model = load_start(
        start,
        config,
        tuple(task for stream in streams.task_streams for task in stream.tasks),
        labels,
        has_exits=settings.adaptive_depth,
        question_head=question_head,
    )
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
        build, {**task, **label_config(hf, model.tasks, placed, labels)}, validation
    )


def _architecture(settings: FinetuneSettings, hf: Mapping[str, Any]) -> AlbertConfig:
    """Return the sizes of the model.

    Raises:
        RunError: sequences are longer than its positions, or too short.
    """
    config = changed_config(
        AlbertConfig.from_hf(hf),
        max_positions=settings.max_positions,
        dropout=settings.dropout,
        classifier_dropout=settings.classifier_dropout,
    )
    # Without --length, windows of questions have 384 tokens, or as many as the model has positions.
    has_default = settings.has_questions_alone and settings.question_length != settings.length
    if not has_default and not MIN_LENGTH <= settings.length <= config.max_positions:
        raise RunError(
            f"--length {settings.length}: a sequence has from {MIN_LENGTH} tokens to the model's "
            f"{config.max_positions} positions"
        )
    check_order_length(settings, config.max_positions)
    return config
