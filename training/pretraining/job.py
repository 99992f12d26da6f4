"""A pretraining run from its configuration to its end."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from albert_serve.config import AlbertConfig
from albert_serve.tokenizer import AlbertTokenizer
from training.data.corpus import find_files
from training.data.preparation import prepare
from training.data.shards import SHARDS_FILE, Shards
from training.data.streams import PackedStream
from training.loop.distributed import World, join_world
from training.loop.driver import PreparedRun, TrainedRun, build_run, train_run
from training.loop.progress import Progress, contains_run, run_precision
from training.loop.step import Mixture, Run
from training.loop.validation import Validation
from training.model.checkpoint import load_checkpoint
from training.model.heads import AlbertForTasks, head_sizes
from training.model.initialization import start_local
from training.model.provenance import file_names
from training.options.config import should_compile
from training.pretraining.config import PretrainConfig, Start
from training.pretraining.recipes import RECIPES, Recipe
from training.system.precision import PrecisionName
from training.tasks.pretraining.files import TextStreams
from training.tasks.pretraining.loss import losses
from training.tasks.pretraining.metrics import held_out

# Default number of tokens in a micro-batch, by type of device.
_MICRO_BATCH_TOKENS: Final = {"cpu": 8192, "cuda": 65536}
# Runs with a smaller budget are not compiled, because compilation takes a minute or two.
_MIN_COMPILED_S: Final = 600
# Maximum number of tokens of held-out text in a validation.
_VALIDATION_TOKENS: Final = 1 << 16


@dataclass(frozen=True, kw_only=True)
class PretrainingJob:
    """A pretraining run: its configuration, and what was chosen or opened for it."""

    config: PretrainConfig
    recipe: Recipe
    architecture: AlbertConfig
    start: Start
    shards: Shards
    world: World
    precision: PrecisionName
    compiles: bool

    @property
    def tokenizer(self) -> AlbertTokenizer:
        """The tokenizer."""
        return self.start.open_tokenizer()

    @property
    def streams(self) -> TextStreams:
        """The task streams."""
        recipe, max_rows = self.recipe, self.config.micro_batch_size
        default_tokens = _MICRO_BATCH_TOKENS.get(self.world.device.type, 8192)
        return TextStreams(
            shards=self.shards,
            tokenizer=self.tokenizer,
            world=self.world,
            num_rows=recipe.batch_size,
            length=recipe.length,
            max_batch_tokens=max_rows * recipe.length if max_rows else default_tokens,
            sentence_task=recipe.sentence_task,
            short_rate=recipe.short_rate,
            mask_rate=recipe.mask_rate,
            seed=recipe.seed,
            rows_option=f"--batch-size {recipe.batch_size}",
            num_workers=self._num_workers,
        )

    @property
    def _num_workers(self) -> int:
        """Number of data loader workers."""
        if self.config.workers is not None:
            return self.config.workers
        if self.world.device.type != "cuda":
            return 0
        return max(1, min(8, (os.cpu_count() or 1) // self.world.size - 1))

    def model(self) -> AlbertForTasks:
        """Return the model with its initial weights."""
        torch.manual_seed(self.recipe.seed)
        sizes = head_sizes(self.architecture, self.recipe.tasks)
        if self.start.folder is not None:
            return load_checkpoint(self.start.folder, sizes)
        model = AlbertForTasks(self.architecture, sizes)
        if self.recipe.start == "local":
            start_local(model, self.shards.token_counts(self.architecture.vocab_size))
        return model

    def pair_stream(self) -> PackedStream:
        """Return the task stream of pairs in both orders."""
        return self.streams.pairs(
            length=self.recipe.order_length,
            max_positions=self.architecture.max_positions,
            short_rate=self.recipe.short_rate,
            min_sentences=self.recipe.order_sentences,
            num_rows=self.recipe.order_batch_size,
        )

    def build(self) -> Run:
        """Build the run at step 0."""
        config, share = self.config, self.recipe.order_share
        stream, model = self.streams.masked(), self.model()
        model.albert.encoder.recomputes = config.recompute
        return build_run(
            model,
            Mixture(
                streams=[stream, self.pair_stream()] if share else [stream],
                weights=[1 - share, share] if share else [1.0],
                loss_weights=self.recipe.loss_weights,
            ),
            losses(compiles=self.compiles),
            self.recipe,
            progress=Progress(num_steps=num_steps(config, self.recipe), budget_s=config.budget),
            world=self.world,
            precision=self.precision,
        )


def num_steps(config: PretrainConfig, recipe: Recipe) -> int | None:
    """Return the number of steps of a run, or None if only its budget ends it."""
    return config.steps or (recipe.num_steps if config.budget is None else None)


def run_record(
    config: PretrainConfig, recipe: Recipe, architecture: AlbertConfig
) -> dict[str, Any]:
    """Return the content of `run.json`, without the precision, which is known later."""
    return {
        "settings": {
            **asdict(recipe),
            "num_steps": num_steps(config, recipe),
            "budget_s": config.budget,
        },
        "config": architecture.to_hf(),
        "corpus": _corpus_record(config),
    }


def _corpus_record(config: PretrainConfig) -> list[list[Any]]:
    """Return the files' names and sizes, or the shards' fingerprint, which identify the corpus."""
    if config.shards is not None:
        return [[Shards.open(config.shards).fingerprint, 0]]
    return [[file.name, file.stat().st_size] for file in find_files(config.corpus)]


def open_job(
    config: PretrainConfig,
    recipe: Recipe,
    architecture: AlbertConfig,
    start: Start,
    world: World,
    precision: PrecisionName,
) -> PretrainingJob:
    """Return the job of a configuration, and prepare its corpus first if necessary."""
    return PretrainingJob(
        config=config,
        recipe=recipe,
        architecture=architecture,
        start=start,
        shards=_open_shards(config.shards, config.corpus, "shards", config, start, world),
        world=world,
        precision=precision,
        compiles=_should_compile(config, world.device),
    )


def _should_compile(config: PretrainConfig, device: torch.device) -> bool:
    """Return whether to compile. By default, runs with a short budget are not compiled."""
    if config.compile is None and (config.budget or math.inf) < _MIN_COMPILED_S:
        print("The budget is short, so training is not compiled. Set --compile to compile it.")
        return False
    return should_compile(config.compile, device)


def run_job(
    config: PretrainConfig, recipe: Recipe, architecture: AlbertConfig, start: Start
) -> TrainedRun:
    """Start or resume the run of a configuration, and train it to its end."""
    record = run_record(config, recipe, architecture)
    contains_run(config.output, record)
    with join_world(config.device) as world:
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        precision = record["precision"] = run_precision(config.precision, config.output, world)
        job = open_job(config, recipe, architecture, start, world, precision)
        return _train(job, record)


def _open_shards(
    shards: Path | None,
    files: Sequence[Path],
    name: str,
    config: PretrainConfig,
    start: Start,
    world: World,
) -> Shards:
    """Open tokenised text. If there are only files, the main process tokenises them first."""
    tokenizer, folder = start.tokenizer / "tokenizer.json", config.output / name
    if shards is not None:
        return Shards.open(shards, tokenizer)
    if world.is_main:
        prepare(files, tokenizer, folder, text_column=config.text_column)
    world.wait_for_all()
    return Shards.open(folder, tokenizer)


def _train(job: PretrainingJob, record: Mapping[str, Any]) -> TrainedRun:
    """Train a job's run, with `record` as the content of `run.json`."""
    config, recipe, world, run = job.config, job.recipe, job.world, job.build()
    sentence_task = "sop" if recipe.order_share else recipe.sentence_task
    trained = train_run(
        PreparedRun(
            config=config,
            run=run,
            record=record,
            program="albert-serve pretrain",
            stage=_stage(job, record),
            start=job.start.folder,
            tokenizer_from=job.start.tokenizer,
            extra_config={"albert_sentence_task": sentence_task},
            validation=_validation(job),
            validate_every=config.validate_every,
            compiles=job.compiles,
        )
    )
    if world.is_main:
        print(
            f"{trained.checkpoint}: {trained.num_steps:,} steps, {run.num_tokens:,} tokens, "
            f"{run.progress.seconds:,.0f} s"
        )
    return trained


def _validation(job: PretrainingJob) -> Validation | None:
    config = job.config
    if not config.validation:
        return None
    shards = None
    if len(config.validation) == 1 and (config.validation[0] / SHARDS_FILE).is_file():
        shards = config.validation[0]
    text = _open_shards(
        shards, config.validation, "validation-shards", config, job.start, job.world
    )
    max_rows = max(1, _VALIDATION_TOKENS // job.recipe.length)
    streams = replace(job.streams, mask_rate=RECIPES["paper"].mask_rate)
    batches = list(held_out(text, streams.collator.masking, streams.examples, max_rows=max_rows))
    return Validation(batches=batches)


def _stage(job: PretrainingJob, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings and data of a run, for the checkpoint's `training.json`."""
    names = [name for name, _ in record["corpus"]]
    if job.config.shards is not None:
        names = file_names([job.config.shards])
    return {
        "settings": {**record["settings"], "precision": record["precision"]},
        "corpus": names,
        "initialize_from": job.start.name,
    }
