"""A pretraining run from its options to its end, as training.pretrain and training.distil do it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from albert_serve.config import AlbertConfig
from training.data.shards import Shards
from training.evaluation.validation import Validation, held_out, unigram_entropy
from training.loop.distributed import World
from training.loop.flops import peak_flops, train_flops_per_token
from training.loop.plateau import PlateauAlarm
from training.loop.progress import Progress
from training.loop.provenance import file_names
from training.loop.step import Run
from training.run.driver import Origin, train_run
from training.run.job import Job
from training.run.options import should_compile
from training.run.recipes import RECIPES, Recipe
from training.system.precision import PrecisionName

# Tokens of held-out text in a validation.
_VALIDATION_TOKENS: Final = 1 << 16


def make_job(
    options: argparse.Namespace,
    config: AlbertConfig,
    recipe: Recipe,
    world: World,
    precision: PrecisionName,
    *,
    num_steps: int | None,
) -> Job:
    """Return the job of the options, whose corpus is prepared if need be."""
    return Job(
        config=config,
        recipe=recipe,
        progress=Progress(num_steps=num_steps, budget_s=options.budget),
        shards=_open_shards(options, world),
        tokenizer=options.tokenizer,
        world=world,
        initialize_from=options.initialize_from,
        micro_batch_size=options.micro_batch_size,
        compiles=should_compile(options),
        recomputes=options.recompute,
        parallelism=options.parallel,
        num_workers=options.workers,
        precision=precision,
    )


def train_job(
    options: argparse.Namespace, job: Job, run: Run, record: dict[str, Any], *, program: str
) -> int:
    """Train a job's run to its end, or resume it; return the exit status.

    Args:
        record: content of `run.json`: settings, config, corpus and precision.
        program: module that trains, such as `training.pretrain`.
    """
    world = job.world
    entropy = unigram_entropy(job.shards, job.config.vocab_size)
    length = job.recipe.length  # slightly over the mean length of packed sequences
    status = train_run(
        options,
        run,
        {**record, "unigram_entropy": round(entropy, 4)},
        _origin(options, record, program),
        alarm=PlateauAlarm(unigram_entropy=entropy, warmup=job.recipe.warmup),
        validation=_validation(options, job),
        flops_a_token=train_flops_per_token(
            job.config,
            length=length,
            masked_rate=job.recipe.mask_rates.mean,
            read_rate=job.recipe.mask_rates.mean + 1 / length,
            num_sentence_outputs=2 if "sentence-order" in job.tasks else 0,
        ),
        peak_flops=peak_flops(world.device, job.precision),
    )
    if world.is_main:
        print(
            f"{options.output / 'checkpoint'}: {run.progress.step:,} steps, "
            f"{run.num_tokens:,} tokens, {run.progress.seconds:,.0f} s"
        )
    return status


def corpus_record(options: argparse.Namespace) -> list[list[Any]]:
    """Return names and sizes of the files, which identify the corpus on any machine."""
    if options.shards is not None:
        return [[Shards.open(options.shards).fingerprint, 0]]
    from training.data.corpus import find_files

    return [[file.name, file.stat().st_size] for file in find_files(options.corpus)]


def _open_shards(options: argparse.Namespace, world: World) -> Shards:
    """Open the tokenised corpus; if need be, the main process first prepares it."""
    tokenizer = options.tokenizer / "tokenizer.json"
    if options.shards is not None:
        return Shards.open(options.shards, tokenizer)
    if world.is_main:
        # Imported here, since a run on shards does not need its dependencies.
        from training.prepare import prepare

        prepare(options.corpus, tokenizer, options.output / "shards")
    world.sum([0.0])
    return Shards.open(options.output / "shards", tokenizer)


def _validation(options: argparse.Namespace, job: Job) -> Validation | None:
    if options.validation is None:
        return None
    tokenizer = job.tokenizer / "tokenizer.json"
    if len(options.validation) == 1 and (options.validation[0] / "shards.json").is_file():
        shards = Shards.open(options.validation[0], tokenizer)
    else:
        from training.prepare import prepare

        if job.world.is_main:
            prepare(options.validation, tokenizer, options.output / "validation-shards")
        job.world.sum([0.0])
        shards = Shards.open(options.output / "validation-shards", tokenizer)
    max_rows = max(1, _VALIDATION_TOKENS // job.recipe.length)
    masking = replace(job.masking, rate=RECIPES["paper"].mask_rate)
    batches = list(held_out(shards, masking, job.example_settings, max_rows=max_rows))
    return Validation(batches=batches, every=options.validate_every)


def _origin(options: argparse.Namespace, record: Mapping[str, Any], program: str) -> Origin:
    files = [options.shards] if options.corpus is None else [Path(n) for n, _ in record["corpus"]]
    settings = record["settings"]
    task = settings["sentence_task"]
    return Origin(
        program=program,
        stage={
            "settings": {**settings, "precision": record["precision"]},
            "corpus": file_names(files),
            "initialize_from": options.initial_name,
        },
        tokenizer_from=options.tokenizer,
        extra_config={"albert_sentence_task": "sop" if settings["order_share"] else task},
    )
