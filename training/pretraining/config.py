"""Configuration of a pretraining run, by the names of the command's flags."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from albert_serve.config import AlbertConfig, Sharing, preset
from albert_serve.tokenizer import AlbertTokenizer
from training.conversion.source import REFERENCE_HELP, open_checkpoint
from training.data.corpus import TEXT_COLUMN_HELP
from training.data.examples import SentenceTask, check_length
from training.errors import RunError
from training.model.checkpoint import load_checkpoint
from training.options.config import (
    COMPILE_HELP,
    ObjectiveOptions,
    Optimization,
    RunFolder,
    StoppingCriteria,
)
from training.options.flags import OptionError, Options, flag
from training.options.values import Count, Fraction, Seed
from training.pretraining.recipes import RECIPES, Dropout, PresetName, Recipe, RecipeName, scaled_lr


@dataclass(frozen=True, kw_only=True)
class _CorpusOptions(Options, title="data"):
    """The text to train on, as files or as shards."""

    corpus: tuple[Path, ...] = flag(
        "text, JSON, CSV or Parquet files, or folders; see docs/pretraining.md", ()
    )
    text_column: str | None = flag(TEXT_COLUMN_HELP, metavar="NAME")
    shards: Path | None = flag("folder that albert-serve prepare wrote, instead of --corpus")
    tokenizer: Path | None = flag(
        "folder that albert-serve vocab wrote (default: tokenizer of --initialize-from)"
    )
    validation: tuple[Path, ...] = flag("held-out text: files, or a folder of shards", ())
    validate_every: Count = flag(
        "steps between validations; the end of the run is validated too", 500
    )

    def __post_init__(self) -> None:
        """Check that there is exactly one corpus."""
        super().__post_init__()
        if bool(self.corpus) == (self.shards is not None):
            raise OptionError("Set either --corpus or --shards.")


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Options, title="model (defaults are the preset's)"):
    """Sizes of a new model, or the initial checkpoint."""

    preset: PresetName | None = flag("sizes of a new model (default: base)")
    embedding_size: Count | None = flag("size of the embeddings")
    hidden_size: Count | None = flag("size of the hidden states")
    layers: Count | None = flag("number of times that layers are applied")
    heads: Count | None = flag("number of attention heads")
    ffn_size: Count | None = flag(
        "size of the feed-forward layer (default: 4 times --hidden-size, if it is set)"
    )
    groups: Count | None = flag("number of groups of layers with separate weights")
    inner_layers: Count | None = flag("number of layers in a group")
    max_positions: Count | None = flag("number of positions, and so the maximum tokens of a text")
    sharing: Sharing | None = flag("weights that the layers of a group share")
    initialize_from: str | None = flag(f"{REFERENCE_HELP}, to start from", metavar="CHECKPOINT")

    @property
    def requested_sizes(self) -> dict[str, Any]:
        """Sizes that options set, by their names in `AlbertConfig`."""
        sizes = {
            "embedding_size": self.embedding_size,
            "hidden_size": self.hidden_size,
            "num_layers": self.layers,
            "num_heads": self.heads,
            "ffn_size": self.ffn_size or (self.hidden_size and 4 * self.hidden_size),
            "num_groups": self.groups,
            "num_inner_layers": self.inner_layers,
            "sharing": self.sharing,
            "max_positions": self.max_positions,
        }
        return {name: value for name, value in sizes.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class _RecipeChanges(ObjectiveOptions, Optimization, title="training (defaults are the recipe's)"):
    """Options that replace the recipe's values."""

    length: Count | None = flag("tokens per row")
    batch_size: Count | None = flag("rows per step")
    sentence_task: SentenceTask | None = flag(
        "sentence task: sentence order, next sentence, or none"
    )
    order_batch_size: Count | None = flag(
        "rows per step of --order-share, each with a pair in both orders (default: about as "
        "many tokens as in other steps, and a multiple of the number of processes)"
    )
    short_rate: Fraction | None = flag(
        "fraction of the documents cut into shorter examples, 0 to 1"
    )
    dropout: Dropout | None = flag("dropout: the paper's (0.1, except in xxlarge: 0), or none")

    def __post_init__(self) -> None:
        """Check that only one task trains the sentence-order head."""
        super().__post_init__()
        if self.order_share and self.sentence_task not in (None, "none"):
            raise RunError(
                f"--sentence-task {self.sentence_task} and --order-share train the same head. "
                "Omit one of them."
            )

    def changed(self, base: Recipe) -> Recipe:
        """Return a recipe in which these options replace the values of the base recipe."""
        changes: dict[str, Any] = {
            field.name: value
            for field in fields(Recipe)
            if (value := getattr(self, field.name, None)) is not None
        }
        if self.batch_size is not None and self.lr is None and self.optimizer is None:
            changes["lr"] = scaled_lr(base, self.batch_size)
        if self.order_share:
            # The small recipe's weight is for labels that share a step with masked tokens.
            changes = {"sentence_weight": 1.0, **changes, "sentence_task": "none"}
        return replace(base, **changes)


@dataclass(frozen=True, kw_only=True)
class _MachineOptions(Options, title="machine"):
    """Options for the machine. They change only the last digits of results."""

    micro_batch_size: Count | None = flag(
        "maximum rows per forward pass, or as many tokens of pairs (default: all of a process)"
    )
    recompute: bool = flag(
        "recompute activations in the backward pass, to save memory (xlarge, xxlarge)",
        default=False,
    )
    workers: Seed | None = flag("number of data loader workers (default: 0 on a CPU)")
    compile: bool | None = flag(
        f"{COMPILE_HELP} (default: yes, if there is a compiler and --budget is not below 10m)"
    )


@dataclass(frozen=True, kw_only=True)
class PretrainConfig(
    _MachineOptions,
    RunFolder,
    _RecipeChanges,
    StoppingCriteria,
    ModelOptions,
    _CorpusOptions,
    title="recipe",
):
    """Configuration of a pretraining run. Its fields are the command's flags."""

    recipe: RecipeName = flag(
        "recipe: the paper's, or one for a few hours on a small machine (default: small)", "small"
    )
    start: Literal["local", "random"] | None = flag(
        "initialization: local attention to neighbours, or the paper's random weights (default:"
        " the recipe's)"
    )

    def __post_init__(self) -> None:
        """Check that the run has an end."""
        super().__post_init__()
        if not (self.has_end or RECIPES[self.recipe].num_steps):
            raise RunError("The run has no end. Set --steps, --budget or --recipe paper.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """The origin of a run's weights and tokenizer.

    Attributes:
        folder: folder of the initial checkpoint, or None for new weights.
        name: name of the initial checkpoint, for provenance.
        tokenizer: folder of the tokenizer.
    """

    folder: Path | None
    name: str | None
    tokenizer: Path

    def open_tokenizer(self) -> AlbertTokenizer:
        """Return the tokenizer."""
        return AlbertTokenizer.from_file(self.tokenizer / "tokenizer.json")


@contextmanager
def open_start(config: PretrainConfig) -> Iterator[Start]:
    """Open the checkpoint of `--initialize-from` during a `with` block.

    The checkpoint's tokenizer is the default.
    """
    if config.initialize_from is not None:
        with open_checkpoint(config.initialize_from) as initial:
            tokenizer = config.tokenizer or initial.folder
            yield Start(folder=initial.folder, name=initial.name, tokenizer=tokenizer)
    elif config.tokenizer is None:
        raise RunError(
            "New weights need a --tokenizer. Set it to a folder that albert-serve vocab wrote."
        )
    else:
        yield Start(folder=None, name=None, tokenizer=config.tokenizer)


def architecture(
    config: PretrainConfig, recipe: Recipe, start: Start, tokenizer: AlbertTokenizer
) -> AlbertConfig:
    """Check all sizes, and return the configuration of the model."""
    if start.folder is None:
        sizes = config.requested_sizes
        new = preset(config.preset or "base", vocab_size=tokenizer.vocab_size, **sizes)
        pad_id = 0 if tokenizer.pad_id is None else tokenizer.pad_id
        new = replace(new, pad_id=pad_id, cls_id=tokenizer.cls_id, sep_id=tokenizer.sep_id)
        dropout = recipe.dropout_of(new)
        model = replace(new, hidden_dropout=dropout, attention_dropout=dropout)
    else:
        model = load_checkpoint(start.folder).config
        _check_sizes(config, model, tokenizer.vocab_size)
    lengths = {"length": recipe.length, "order-length": recipe.order_length or recipe.length}
    for name, length in lengths.items():
        check_length(f"--{name}", length, model.max_positions)
    return model


def _check_sizes(config: PretrainConfig, initial: AlbertConfig, vocab_size: int) -> None:
    """Check that the requested sizes are equal to the initial checkpoint's sizes."""
    if config.preset is not None:
        raise RunError(
            "--preset cannot be combined with --initialize-from, which has its own sizes. Omit one "
            "of them."
        )
    if initial.vocab_size != vocab_size:
        raise RunError(
            f"{config.initialize_from} has {initial.vocab_size} tokens, but --tokenizer has "
            f"{vocab_size}. Omit --tokenizer."
        )
    for name, value in config.requested_sizes.items():
        if getattr(initial, name) != value:
            raise RunError(
                f"{name} {value} is not the size of {config.initialize_from}, which is "
                f"{getattr(initial, name)}. Omit the option."
            )
