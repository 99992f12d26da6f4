"""Pretraining job: builds the run from a recipe."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from albert_serve.config import AlbertConfig
from albert_serve.tokenizer import AlbertTokenizer
from training.data.batch import LossName
from training.data.collate import Collate, Collator, Slicing
from training.data.examples import ExampleSettings
from training.data.feeds import Feed, PlannedFeed
from training.data.masking import NgramMasking, word_starts
from training.data.order import order_feed
from training.data.packing import Plan
from training.data.shards import Shards
from training.loop.distributed import Parallelism, World, share
from training.loop.progress import Progress, RunError
from training.loop.step import Run
from training.losses import LOSS_OF, LossFunction, Objective, compiled_losses
from training.model.checkpoint import load_checkpoint
from training.model.heads import AlbertForTasks, Task, head_sizes
from training.model.initialization import start_local
from training.model.resizing import grow_depth
from training.optim.optimizers import build_optimizers
from training.order_losses import order_loss
from training.run.recipes import Recipe
from training.system.precision import PrecisionName

# Maximum tokens of a pair in both orders, where neither the recipe nor the model has less.
ORDER_LENGTH: Final = 512
# Default tokens of a micro-batch.
_TOKENS_A_MICRO_BATCH: Final = {"cpu": 8192, "cuda": 65536}


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The settings of one pretraining run.

    Attributes:
        tokenizer: folder that `training.vocab` wrote.
        initialize_from: a checkpoint's folder, for initial weights; None for new ones.
        micro_batch_size: rows per micro-batch, of pairs in both orders as many tokens at most; None
            for the device's default. It changes sums in their last digits only.
        compiles: whether the model and its losses are compiled.
        recomputes: whether activations are recomputed to save memory.
        num_workers: data loader workers; None for the device's default.
        precision: of matrix products.
    """

    config: AlbertConfig
    recipe: Recipe
    progress: Progress
    shards: Shards
    tokenizer: Path
    world: World
    initialize_from: Path | None = None
    micro_batch_size: int | None = None
    compiles: bool = True
    recomputes: bool = False
    parallelism: Parallelism = "ddp"
    num_workers: int | None = None
    precision: PrecisionName = "auto"

    @property
    def example_settings(self) -> ExampleSettings:
        """The settings for cutting examples."""
        return ExampleSettings(
            length=self.recipe.length,
            sentence_task=self.recipe.sentence_task,
            short_rate=self.recipe.short_rate,
        )

    @property
    def masking(self) -> NgramMasking:
        """The masking of tokens."""
        tokenizer = AlbertTokenizer.from_file(self.tokenizer / "tokenizer.json")
        return NgramMasking(word_starts=word_starts(tokenizer), rate=self.recipe.mask_rates.highest)

    @property
    def slicing(self) -> Slicing:
        """The division of a step's rows into micro-batches.

        Raises:
            RunError: the rows are not divisible.
        """
        rows, size = self.recipe.batch_size, self.world.size
        fitting = self._rows_a_batch(rows, self.recipe.length, "--batch-size")
        rows_a_batch = self.micro_batch_size or fitting
        if rows % (rows_a_batch * size):
            raise RunError(
                f"--batch-size {rows} is no multiple of --micro-batch-size {rows_a_batch} "
                f"times {size} processes"
            )
        return Slicing(
            num_rows=rows, rows_a_batch=rows_a_batch, rank=self.world.rank, world_size=size
        )

    def _rows_a_batch(self, num_rows: int, length: int, option: str) -> int:
        """Return the rows of a micro-batch that suit the device, or `micro_batch_size`."""
        if num_rows % self.world.size:
            raise RunError(f"{option} {num_rows} is no multiple of the {self.world.size} processes")
        if self.micro_batch_size is None:
            most = _TOKENS_A_MICRO_BATCH.get(self.world.device.type, 8192)
        else:
            most = self.micro_batch_size * self.recipe.length
        return rows_a_batch(num_rows // self.world.size, length, most)

    @property
    def plan(self) -> Plan:
        """The plan of steps over the corpus."""
        return Plan(shards=self.shards, settings=self.example_settings, seed=self.recipe.seed)

    @property
    def collator(self) -> Collator:
        """The collate function."""
        return Collator(
            shards=self.shards,
            masking=self.masking,
            length=self.recipe.length,
            seed=self.recipe.seed,
            has_labels=self.recipe.sentence_task != "none",
        )

    @property
    def num_loaders(self) -> int:
        """The number of data loader workers."""
        if self.num_workers is not None:
            return self.num_workers
        if self.world.device.type != "cuda":
            return 0
        return max(1, min(8, (os.cpu_count() or 1) // self.world.size - 1))

    def model(self) -> AlbertForTasks:
        """Return the model with its initial weights."""
        torch.manual_seed(self.recipe.seed)
        sizes = head_sizes(self.config, self.tasks)
        if self.initialize_from is not None:
            shallow = load_checkpoint(self.initialize_from, sizes)
            return grow_depth(shallow, self.config.num_layers)
        model = AlbertForTasks(self.config, sizes)
        if self.recipe.start == "local":
            start_local(model, self.shards.token_counts(self.config.vocab_size))
        return model

    def check(self) -> None:
        """Check that the settings are compatible.

        Raises:
            RunError: the optimizer cannot be sharded.
        """
        if self.parallelism == "fsdp" and self.recipe.optimizer == "muon":
            raise RunError("muon needs whole matrices; with --parallel fsdp take lamb or adamw")

    def build(self) -> Run:
        """Build the run at step 0.

        Raises:
            RunError: the batch is not divisible, or the optimizer cannot be sharded.
        """
        self.check()
        feed = self.feed(self.collator)
        return self.assemble(
            self.model(),
            feed,
            compiled_losses() if self.compiles else LOSS_OF,
            {},
        )

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks whose heads the run trains."""
        has_order = self.recipe.order_share or self.recipe.sentence_task != "none"
        return ("fill-mask", "sentence-order") if has_order else ("fill-mask",)

    def feed(self, collate: Collate) -> PlannedFeed:
        """Return the task stream over the corpus."""
        return PlannedFeed(
            plan=self.plan, collate=collate, slicing=self.slicing, num_workers=self.num_loaders
        )

    def order_feed(self) -> PlannedFeed:
        """Return the task stream of pairs in both orders.

        Raises:
            RunError: the rows are not divisible.
        """
        recipe = self.recipe
        length = recipe.order_length or min(ORDER_LENGTH, self.config.max_positions)
        size = self.world.size
        rows = recipe.order_batch_size or rows_of_pairs(
            recipe.batch_size * recipe.length, length, size
        )
        return order_feed(
            self.shards,
            ExampleSettings(
                length=length,
                sentence_task="pairs",
                short_rate=recipe.short_rate,
                min_sentences=recipe.order_sentences,
            ),
            Slicing(
                num_rows=rows,
                rows_a_batch=self._rows_a_batch(rows, 2 * length, "--order-batch-size"),
                rank=self.world.rank,
                world_size=size,
            ),
            seed=recipe.seed,
            num_workers=self.num_loaders,
        )

    def assemble(
        self,
        model: AlbertForTasks,
        feed: Feed,
        loss_of: Mapping[str, LossFunction],
        loss_weights: Mapping[LossName, float],
    ) -> Run:
        """Assemble the run at step 0 of a new model on a task stream."""
        model = model.to(self.world.device)
        model.albert.encoder.recomputes = self.recomputes
        share_of_order = self.recipe.order_share
        feeds = [feed, self.order_feed()] if share_of_order else [feed]
        loss_of = {**loss_of, "sentence-order": order_loss(compiles=self.compiles)}
        objective = Objective(model, self.world.device, loss_of)
        sentence_weight = self.recipe.sentence_weight
        return Run(
            model=model,
            objective=share(
                objective, model, self.world, self.parallelism, trains_all=len(feeds) == 1
            ),
            optimizers=build_optimizers(model, self.recipe.optimizer_settings, self.precision),
            schedule=self.recipe.rate_schedule,
            feeds=feeds,
            weights=[1 - share_of_order, share_of_order][: len(feeds)],
            loss_weights={
                "sentence-order": sentence_weight,
                "paired-order": sentence_weight,
                **loss_weights,
            },
            clip_norm=self.recipe.clip_norm,
            seed=self.recipe.seed,
            world=self.world,
            progress=self.progress,
            precision=self.precision,
            mask_rates=self.recipe.mask_rates,
        )


def rows_of_pairs(num_tokens: int, length: int, num_processes: int) -> int:
    """Return the rows of pairs in both orders of about as many tokens, for all processes alike."""
    return max(1, num_tokens // (2 * length) // num_processes) * num_processes


def rows_a_batch(num_rows: int, length: int, num_tokens: int) -> int:
    """Return the rows of a micro-batch: the largest divisor of a process's rows within the tokens.

    Args:
        num_rows: of a step of one process.
        length: tokens of a row; of pairs in both orders, twice those of a pair.
        num_tokens: maximum of a micro-batch, which has one row at least.
    """
    most = max(1, num_tokens // length)
    return max(rows for rows in range(1, min(num_rows, most) + 1) if num_rows % rows == 0)
