"""The options that training.pretrain and training.distil share, and what they say of the model."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

from albert_serve.config import PRESETS, AlbertConfig, Sharing, preset
from training.conversion.source import REFERENCE_HELP, open_initial
from training.data.examples import MIN_LENGTH, SentenceTask
from training.loop.distributed import Parallelism
from training.loop.progress import RunError
from training.model.checkpoint import load_checkpoint
from training.run.options import (
    add_compile,
    add_mask_rate,
    add_optimization,
    add_order,
    check_order_share,
    mask_rates_of,
    parse_count,
    parse_part,
    parse_seed,
)
from training.run.recipes import Dropout, Recipe, scaled_lr


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
    add(
        "--validate-every",
        type=parse_count,
        default=500,
        help="steps between validations (500); the end of the run is validated in any case",
    )


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
    add_mask_rate(how, default="the recipe's")
    add("--sentence-task", choices=get_args(SentenceTask), help="order, next sentence, or none")
    add_order(how)
    add(
        "--order-batch-size",
        type=parse_count,
        help="rows of such pairs per step, each in both orders (about as many tokens as in other "
        "steps, and a multiple of the processes)",
    )
    add("--short-rate", type=parse_part, help="fraction of documents cut into shorter examples")
    add("--dropout", choices=get_args(Dropout), help="0.1 except in xxlarge, or none")
    add_optimization(how, {})


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Add the options for the machine, which change results in their last digits at most."""
    machine = parser.add_argument_group("machine")
    add = machine.add_argument
    add(
        "--micro-batch-size",
        type=parse_count,
        help="rows per forward pass; as many tokens of pairs",
    )
    add("--parallel", choices=get_args(Parallelism), default="ddp", help="under torchrun (ddp)")
    add(
        "--recompute",
        action="store_true",
        help="recompute activations in the backward pass; for xlarge and xxlarge",
    )
    add("--workers", type=parse_seed, help="data loader workers (0 on a CPU)")
    add_compile(machine)


def changed_recipe(recipe: Recipe, options: argparse.Namespace) -> Recipe:
    """Return the recipe with its values overridden by the given options."""
    overrides = {
        field.name: getattr(options, field.name)
        for field in fields(Recipe)
        if getattr(options, field.name, None) is not None
    }
    if "batch_size" in overrides and "lr" not in overrides and "optimizer" not in overrides:
        overrides["lr"] = scaled_lr(recipe, overrides["batch_size"])
    if given := overrides.pop("mask_rate", None):
        rates = mask_rates_of(given)
        overrides["mask_rate"] = rates.first
        overrides["final_mask_rate"] = rates.last if rates.changes else None
    if overrides.get("order_share"):
        overrides = _order_overrides(recipe, overrides)
    return replace(recipe, **overrides)


def _order_overrides(recipe: Recipe, overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the overrides for a run with pairs in both orders.

    Raises:
        RunError: they leave no masked rows, or give those a sentence task as well.
    """
    check_order_share(overrides["order_share"])
    if overrides.get("sentence_task", "none") != "none":
        raise RunError(
            f"--sentence-task {overrides['sentence_task']} and --order-share train the same head; "
            "give one of them"
        )
    # The small recipes' weight is for one label a sequence among its masked tokens.
    return {"sentence_weight": 1.0, **overrides, "sentence_task": "none"}


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


def _check_length(config: AlbertConfig, recipe: Recipe) -> AlbertConfig:
    """Return the config if it has enough positions for the recipe's rows.

    Raises:
        RunError: it has too few.
    """
    lengths = {"length": recipe.length, "order-length": recipe.order_length or recipe.length}
    for name, length in lengths.items():
        if not MIN_LENGTH <= length <= config.max_positions:
            raise RunError(
                f"--{name} {length}: a sequence has from {MIN_LENGTH} tokens to the model's "
                f"{config.max_positions} positions (--max-positions)"
            )
    return config
