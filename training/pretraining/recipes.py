"""Training recipes: the paper's, and one for a few hours on a small machine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

from albert_serve.config import AlbertConfig, preset
from training.data.examples import SentenceTask
from training.model.heads import Task
from training.model.initialization import Start
from training.optim.optimizers import Hyperparameters

# `v1` means 0.1, or 0 in xxlarge. `v2` means no dropout (section 4.8 and the original's README).
Dropout = Literal["v1", "v2"]
RecipeName = Literal["paper", "small"]
PresetName = Literal["base", "large", "xlarge", "xxlarge", "small"]
# The paper's learning rate assumes this batch size.
_PAPER_BATCH: Final = 4096


@dataclass(frozen=True, kw_only=True)
class Recipe(Hyperparameters):
    """Settings of a pretraining run, except the corpus, the model's sizes and the budget.

    Attributes:
        length: number of tokens in a row, which contains one example or several packed examples.
        batch_size: number of rows per step.
        num_steps: number of steps of the run, or None if the recipe does not set it.
        mask_rate: fraction of the tokens to predict.
        sentence_task: sentence task of the masked rows.
        short_rate: fraction of the documents that are cut into shorter examples.
        start: initialization of the weights.
        dropout: dropout of ALBERT v1 or v2.
        order_share: fraction of the steps that train on unmasked pairs of segments in both orders.
            These pairs replace the sentence task of the masked rows.
        order_length: maximum number of tokens in a pair. None means 512, or the model's number of
            positions if that is less.
        order_batch_size: number of rows of pairs per step, each in both orders. None means about as
            many tokens as in the other steps.
        order_sentences: minimum number of sentences in each segment of a pair.
    """

    length: int
    batch_size: int
    num_steps: int | None
    mask_rate: float
    sentence_task: SentenceTask
    short_rate: float
    start: Start
    dropout: Dropout
    order_share: float = 0.0
    order_length: int | None = None
    order_batch_size: int | None = None
    order_sentences: int = 2

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks whose heads the run trains."""
        has_order = self.order_share or self.sentence_task != "none"
        return ("fill-mask", "sentence-order") if has_order else ("fill-mask",)

    def dropout_of(self, config: AlbertConfig) -> float:
        """Return the dropout of hidden states and attention in a model of these sizes."""
        is_widest = config.hidden_size >= preset("xxlarge").hidden_size
        return 0.0 if self.dropout == "v2" or is_widest else 0.1


RECIPES: Final[dict[RecipeName, Recipe]] = {
    # Section 4.1 and google-research/ALBERT: 125,000 steps of 4,096 x 512 tokens, LAMB.
    "paper": Recipe(
        length=512,
        batch_size=_PAPER_BATCH,
        num_steps=125_000,
        optimizer="lamb",
        lr=0.00176,
        adamw_lr=0.00176,
        pooled_factor=1.0,
        weight_decay=0.01,
        schedule="linear",
        warmup=0.025,
        decay=1.0,
        mask_rate=0.15,
        sentence_task="sop",
        sentence_weight=1.0,
        short_rate=0.1,
        clip_norm=1.0,
        start="random",
        dropout="v1",
    ),
    # docs/decisions.md has the measurements behind these values.
    "small": Recipe(
        length=128,
        batch_size=32,
        num_steps=None,
        optimizer="muon",
        lr=1e-3,
        adamw_lr=3e-3,
        pooled_factor=0.1,
        weight_decay=0.01,
        schedule="wsd",
        warmup=0.03,
        decay=0.3,
        mask_rate=0.2,
        sentence_task="sop",
        sentence_weight=0.1,
        short_rate=0.1,
        clip_norm=1.0,
        start="local",
        dropout="v2",
    ),
}


def scaled_lr(recipe: Recipe, batch_size: int) -> float:
    """Return a batch size's learning rate. LAMB's scales with the square root (You et al. 2019)."""
    if recipe.optimizer != "lamb":
        return recipe.lr
    return recipe.lr * math.sqrt(batch_size / recipe.batch_size)
