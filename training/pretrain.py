"""Pretraining from text: masked n-grams and sentence order (Lan et al. 2019, section 3.1).

Writes into the output folder: `checkpoints/`, of which `checkpoint` is the newest (Hugging Face
directories), `metrics.jsonl`, `layers.jsonl` and `tensorboard/`. The same command resumes a run
that was stopped or killed. On several GPUs or hosts start it with torchrun.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, get_args

from albert_serve.config import PRESETS, AlbertConfig, Sharing, preset
from albert_serve.tokenizer import AlbertTokenizer
from training.conversion.source import REFERENCE_HELP, open_initial
from training.data.examples import MIN_LENGTH, SentenceTask
from training.data.shards import Shards
from training.errors import report_errors
from training.evaluation.validation import Validation, held_out, unigram_entropy
from training.loop.distributed import Parallelism, World, join_world
from training.loop.flops import peak_flops, train_flops_per_token
from training.loop.plateau import PlateauAlarm
from training.loop.progress import Progress, RunError, is_known_run
from training.loop.provenance import file_names
from training.loop.reproducibility import run_precision
from training.loop.step import Run
from training.model.checkpoint import load_checkpoint
from training.run.driver import Origin, train_run
from training.run.job import Job
from training.run.options import (
    add_compile,
    add_end,
    add_optimization,
    add_reports,
    parse_count,
    parse_part,
    parse_seed,
    should_compile,
)
from training.run.recipes import RECIPES, Dropout, Recipe, scaled_lr
from training.system.command_line import make_parser
from training.system.precision import PrecisionName

# Tokens of held-out text in a validation.
_VALIDATION_TOKENS: Final = 1 << 16

_EXAMPLES: Final = r"""examples:
  python -m training.pretrain --corpus wiki/*.jsonl.xz --tokenizer vocab/ --output runs/base \
      --preset base --recipe paper
  python -m training.pretrain --shards wiki-shards/ --tokenizer vocab/ --output runs/small \
      --preset small --recipe small --budget 2h --validation held-out.jsonl
  torchrun --nproc-per-node 8 -m training.pretrain --shards wiki-shards/ --tokenizer vocab/ \
      --output runs/xxlarge --preset xxlarge --recipe paper --parallel fsdp --recompute
  python -m training.pretrain --initialize-from runs/3-layers/checkpoint --layers 12 \
      --shards wiki-shards/ --tokenizer vocab/ --output runs/12-layers --budget 2h
  python -m training.pretrain --initialize-from albert/albert-base-v2 --corpus letters/ \
      --output runs/letters --budget 2h
"""


def changed_recipe(recipe: Recipe, options: argparse.Namespace) -> Recipe:
    """Return the recipe with its values overridden by the given options."""
    overrides = {
        field.name: getattr(options, field.name)
        for field in fields(Recipe)
        if getattr(options, field.name, None) is not None
    }
    if "batch_size" in overrides and "lr" not in overrides and "optimizer" not in overrides:
        overrides["lr"] = scaled_lr(recipe, overrides["batch_size"])
    return replace(recipe, **overrides)


def _given_sizes(options: argparse.Namespace) -> dict[str, Any]:
    """Return the sizes that the options set, by the names of `AlbertConfig`."""
    sizes = {
        "embedding_size": options.embedding_size,
        "hidden_size": options.hidden_size,
        "num_layers": options.layers,
        "num_heads": options.heads,
        "ffn_size": options.ffn_size or (options.hidden_size and 4 * options.hidden_size),
        "num_groups": options.groups,
        "num_inner_layers": options.inner_layers,
        "sharing": options.sharing,
        "max_positions": options.max_positions,
    }
    return {name: value for name, value in sizes.items() if value is not None}


def make_config(
    options: argparse.Namespace,
    recipe: Recipe,
    vocab_size: int,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> AlbertConfig:
    """Return the config that the options name.

    Args:
        defaults: sizes of new weights that the options leave out, in place of the preset's.

    Raises:
        RunError: the checkpoint to start from has other sizes, or too few positions.
    """
    sizes = _given_sizes(options)
    if options.initialize_from is None:
        sizes = {**defaults, **sizes}
        config = preset(options.preset or "base", vocab_size=vocab_size, **sizes)
        dropout = recipe.dropout_of(config)
        config = replace(config, hidden_dropout=dropout, attention_dropout=dropout)
    else:
        config = _grown_config(options, sizes, vocab_size)
    return _check_length(config, recipe)


def _check_length(config: AlbertConfig, recipe: Recipe) -> AlbertConfig:
    """Return the config if it has enough positions for the recipe's rows.

    Raises:
        RunError: it has too few.
    """
    if not MIN_LENGTH <= recipe.length <= config.max_positions:
        raise RunError(
            f"--length {recipe.length}: a sequence has from {MIN_LENGTH} tokens to the model's "
            f"{config.max_positions} positions (--max-positions)"
        )
    return config


def _grown_config(
    options: argparse.Namespace, sizes: Mapping[str, Any], vocab_size: int
) -> AlbertConfig:
    """Return the config of the initial checkpoint, with the number of layers from `--layers`.

    Raises:
        RunError: the options set other sizes than the checkpoint's.
    """
    config = load_checkpoint(options.initialize_from).config
    if options.preset is not None:
        raise RunError("--preset goes with new weights; --initialize-from has sizes of its own")
    if config.vocab_size != vocab_size:
        raise RunError(
            f"{options.initialize_from} has {config.vocab_size} tokens, --tokenizer {vocab_size}"
        )
    for name, value in sizes.items():
        if name != "num_layers" and getattr(config, name) != value:
            raise RunError(
                f"{name} {value}: {options.initialize_from} has {getattr(config, name)}; "
                "only the number of layers can grow"
            )
    return replace(config, num_layers=options.layers or config.num_layers)


def open_shards(options: argparse.Namespace, world: World) -> Shards:
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


def corpus_record(options: argparse.Namespace) -> list[list[Any]]:
    """Return names and sizes of the files, which identify the corpus on any machine."""
    if options.shards is not None:
        return [[Shards.open(options.shards).fingerprint, 0]]
    from training.data.corpus import find_files

    return [[file.name, file.stat().st_size] for file in find_files(options.corpus)]


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    options = build_parser().parse_args(arguments)
    return report_errors(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    with open_start(options) as local:
        return _train(local)


@contextmanager
def open_start(options: argparse.Namespace) -> Iterator[argparse.Namespace]:
    """Open the checkpoint of `--initialize-from`, for `with`; see `open_initial`.

    Its tokenizer is taken if the options name none.

    Raises:
        RunError: there is neither a tokenizer nor a checkpoint.
        CheckpointError: the checkpoint cannot be found or read.
    """
    with open_initial(options) as local:
        if local.tokenizer is None and local.initialize_from is None:
            raise RunError("new weights need a --tokenizer: a folder that training.vocab wrote")
        tokenizer = local.tokenizer or local.initialize_from
        yield argparse.Namespace(**{**vars(local), "tokenizer": tokenizer})


def _train(options: argparse.Namespace) -> int:
    tokenizer = AlbertTokenizer.from_file(options.tokenizer / "tokenizer.json")
    recipe = changed_recipe(RECIPES[options.recipe], options)
    steps = options.steps or (recipe.num_steps if options.budget is None else None)
    config = make_config(options, recipe, tokenizer.vocab_size)
    record: dict[str, Any] = {
        "settings": {**asdict(recipe), "num_steps": steps, "budget_s": options.budget},
        "config": config.to_hf(),
        "corpus": corpus_record(options),
    }
    is_known_run(options.output, record)
    with join_world(options.device) as world:
        record["precision"] = run_precision(options.precision, options.output, world)
        job = make_job(options, config, recipe, world, record["precision"], num_steps=steps)
        return train_job(options, job, job.build(), record, program="training.pretrain")


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
        shards=open_shards(options, world),
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
            masked_rate=job.recipe.mask_rate,
            read_rate=job.recipe.mask_rate + 1 / length,
            num_sentence_outputs=0 if job.recipe.sentence_task == "none" else 2,
        ),
        peak_flops=peak_flops(world.device, job.precision),
    )
    if world.is_main:
        print(
            f"{options.output / 'checkpoint'}: {run.progress.step:,} steps, "
            f"{run.num_tokens:,} tokens, {run.progress.seconds:,.0f} s"
        )
    return status


def _origin(options: argparse.Namespace, record: Mapping[str, Any], program: str) -> Origin:
    files = [options.shards] if options.corpus is None else [Path(n) for n, _ in record["corpus"]]
    return Origin(
        program=program,
        stage={
            "settings": {**record["settings"], "precision": record["precision"]},
            "corpus": file_names(files),
            "initialize_from": options.initial_name,
        },
        tokenizer_from=options.tokenizer,
        extra_config={"albert_sentence_task": record["settings"]["sentence_task"]},
    )


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of this command."""
    parser = make_parser("training.pretrain", __doc__, _EXAMPLES)
    add_data(parser)
    add_sizes(parser)
    add_end(parser)
    how = parser.add_argument_group("training (defaults are the recipe's)")
    how.add_argument(
        "--recipe",
        choices=list(RECIPES),
        default="small",
        help="the paper's, or one for a few hours on a small machine (small)",
    )
    how.add_argument(
        "--start",
        choices=("local", "random"),
        help="initialization: attention to neighbours, or the paper's random weights",
    )
    add_recipe(how)
    add_reports(parser)
    add_machine(parser)
    return parser


def add_data(parser: argparse.ArgumentParser) -> None:
    """Add the options of the corpus, the tokenizer and the run's folder."""
    data = parser.add_argument_group("data")
    corpus = data.add_mutually_exclusive_group(required=True)
    corpus.add_argument("--corpus", nargs="+", type=Path, help="files of text, or folders")
    corpus.add_argument("--shards", type=Path, help="folder that training.prepare wrote")
    add = data.add_argument
    add(
        "--tokenizer",
        type=Path,
        help="folder that training.vocab wrote (that of --initialize-from)",
    )
    add("--output", type=Path, required=True, help="the run's folder")
    add("--validation", nargs="+", type=Path, help="held-out text, or a folder of its shards")
    add("--validate-every", type=parse_count, default=500, help="steps (500)")


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add the options of the model."""
    sizes = parser.add_argument_group("model (defaults are the preset's)")
    sizes.add_argument("--preset", choices=list(PRESETS), help="(base)")
    for name in (
        *("embedding-size", "hidden-size", "layers", "heads", "ffn-size"),
        *("groups", "inner-layers", "max-positions"),
    ):
        sizes.add_argument(f"--{name}", type=parse_count)
    sizes.add_argument("--sharing", choices=get_args(Sharing))
    sizes.add_argument(
        "--initialize-from",
        metavar="CHECKPOINT",
        help=f"{REFERENCE_HELP}, for the initial weights; --layers may be more",
    )


def add_recipe(how: argparse._ArgumentGroup) -> None:
    """Add the options that override a recipe."""
    add = how.add_argument
    add("--length", type=parse_count, help="tokens per row")
    add("--batch-size", type=parse_count, help="rows per step")
    add("--mask-rate", type=parse_part, help="fraction of the tokens that is predicted")
    add("--sentence-task", choices=get_args(SentenceTask), help="order, next sentence, or none")
    add("--short-rate", type=parse_part, help="fraction of documents cut into shorter examples")
    add("--dropout", choices=get_args(Dropout), help="0.1 except in xxlarge, or none")
    add_optimization(how, {})


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Add the options for the machine, which change results in their last digits at most."""
    machine = parser.add_argument_group("machine")
    add = machine.add_argument
    add("--micro-batch-size", type=parse_count, help="rows per forward pass")
    add("--parallel", choices=get_args(Parallelism), default="ddp", help="under torchrun (ddp)")
    add(
        "--recompute",
        action="store_true",
        help="recompute activations in the backward pass; for xlarge and xxlarge",
    )
    add("--workers", type=parse_seed, help="data loader workers (0 on a CPU)")
    add_compile(machine)


if __name__ == "__main__":
    sys.exit(main())
