"""Continued pretraining in a run: configuration, data, and losses of both pretraining tasks.

Shape legend: B rows, S positions, H hidden size, R gathered rows, C sequences or pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from training.data.batch import LossName, PretrainBatch
from training.data.examples import IGNORED, SentenceTask
from training.data.preparation import prepare
from training.errors import RunError
from training.loop.distributed import main_first
from training.losses import LossFunction, LossSums, cross_entropy, mark_dynamic
from training.model.albert import ModelInputs
from training.model.heads import AlbertForTasks
from training.tasks.base import TrainingSetup, TrainingTask
from training.tasks.pretraining.files import OrderBatch, TextStreams

TASK: Final = "pretraining"


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainingConfig:
    """The configuration of continued pretraining in a run.

    Attributes:
        files: files of plain text.
        tokenizer_file: `tokenizer.json` that tokenises the text.
        shards: folder for the tokenised text.
        sentence_task: sentence task of the masked rows. If `has_pairs` is true, it is ignored.
        mask_rate: fraction of the tokens that are masked.
        short_rate: fraction of the documents that are cut into shorter examples.
        has_pairs: whether separate steps train sentence order on pairs in both orders.
        order_length: maximum number of tokens in a pair. None means 512, or the model's number of
            positions if that is less.
        order_short_rate: fraction of the documents that are cut into shorter pairs.
        order_sentences: minimum number of sentences in each segment of a pair.
    """

    files: Sequence[Path]
    tokenizer_file: Path
    shards: Path
    sentence_task: SentenceTask
    mask_rate: float
    short_rate: float
    has_pairs: bool
    order_length: int | None
    order_short_rate: float
    order_sentences: int


def read_text(config: PretrainingConfig, setup: TrainingSetup, batch_size: int) -> TrainingTask:
    """Open the tokenised text, after preparing it if necessary.

    Args:
        batch_size: number of masked rows per step of all processes.
    """
    world = setup.world
    rows_option = f"--batch-size {batch_size} of pretraining"
    if batch_size % world.size:  # checked first, because preparing text takes long
        raise RunError(f"{rows_option} is not a multiple of the {world.size} processes.")
    with main_first(world):
        shards = prepare(config.files, config.tokenizer_file, config.shards)
    text = TextStreams(
        shards=shards,
        tokenizer=setup.tokenizer,
        world=world,
        num_rows=batch_size,
        length=setup.length,
        max_batch_tokens=(setup.micro_batch_size or batch_size) * setup.length,
        sentence_task="none" if config.has_pairs else config.sentence_task,
        short_rate=config.short_rate,
        mask_rate=config.mask_rate,
        seed=setup.seed,
        rows_option=rows_option,
    )
    streams = [text.masked()]
    if config.has_pairs:
        pairs = text.pairs(
            length=config.order_length,
            max_positions=setup.architecture.max_positions,
            short_rate=config.order_short_rate,
            min_sentences=config.order_sentences,
        )
        streams.append(pairs)
    return TrainingTask(name=TASK, streams=streams, losses=losses(compiles=setup.compiles))


def losses(*, compiles: bool) -> dict[str, LossFunction]:
    """Return the loss functions of masked rows and of pairs, compiled on request."""
    if not compiles:
        return {TASK: pretrain_loss, "sentence-order": paired_order_loss}
    return {
        TASK: partial(pretrain_loss, sums=torch.compile(_pretrain_sums)),
        "sentence-order": partial(paired_order_loss, logits=torch.compile(_order_logits)),
    }


class PretrainTargets(NamedTuple):
    """The positions that the pretraining heads read, and their targets.

    Attributes:
        rows, targets: (R,) positions and ids of masked tokens.
        firsts, labels: (C,) positions and targets of the sentence task, or None without the task.
    """

    rows: Tensor
    targets: Tensor
    firsts: Tensor | None
    labels: Tensor | None

    @classmethod
    def of(cls, model: AlbertForTasks, batch: PretrainBatch) -> PretrainTargets:
        """Return the positions that the model's heads read, and their targets.

        If the batch has no sentence task, the task's head is not computed. Otherwise, weight decay
        would change the head, although its gradients are 0.
        """
        if "sentence-order" in model.tasks and "sentence-order" in batch.counts:
            return cls(batch.rows, batch.targets, batch.firsts, batch.labels)
        return cls(batch.rows, batch.targets, None, None)

    @property
    def positions(self) -> Tensor:
        """The positions to gather: masked tokens, then each [CLS]."""
        return self.rows if self.firsts is None else torch.cat([self.rows, self.firsts])


# The summed loss and the number of right answers of each head.
HeadSums: TypeAlias = dict[LossName, tuple[Tensor, Tensor]]


def _pretrain_sums(
    model: AlbertForTasks, tokens: ModelInputs, targets: PretrainTargets
) -> HeadSums:
    """Return the sums of each head. The arguments contain only tensors, for compilation."""
    hidden_RH = model(tokens, targets.positions)
    num_masked = len(targets.targets)
    masked = cross_entropy(model.logits("fill-mask", hidden_RH[:num_masked]), targets.targets, 0)
    sums: HeadSums = {"fill-mask": (masked.loss, masked.right)}
    if targets.labels is not None:
        order = cross_entropy(
            model.logits("sentence-order", hidden_RH[num_masked:]), targets.labels, 0
        )
        sums["sentence-order"] = (order.loss, order.right)
    return sums


def pretrain_loss(
    model: AlbertForTasks,
    batch: PretrainBatch,
    sums: Callable[..., HeadSums] = _pretrain_sums,
) -> dict[LossName, LossSums]:
    """Return the losses of masked tokens and, if the batch has one, of the sentence task.

    See the paper, sections 3.1 and 4.1. The last layer after its attention, and the logits, are
    computed only for the positions of targets.
    """
    targets = PretrainTargets.of(model, batch)
    if sums is not _pretrain_sums:
        mark_dynamic(targets)
    return {
        name: LossSums(loss=loss, right=right, count=batch.counts[name])
        for name, (loss, right) in sums(model, batch.tokens, targets).items()
    }


def _order_logits(model: AlbertForTasks, tokens: ModelInputs, firsts: Tensor) -> Tensor:
    """Return the logits (2 C, 2) of sentence order, from each sequence's [CLS] row."""
    return model.logits("sentence-order", model(tokens, firsts))


def paired_order_loss(
    model: AlbertForTasks, batch: OrderBatch, logits: Callable[..., Tensor] = _order_logits
) -> dict[LossName, LossSums]:
    """Return the two losses of pairs in both orders.

    Let s be the log-odds of "in order". `paired-order` is -log sigmoid((s(A, B) - s(B, A)) / 2).
    This loss ignores any number that the pair's content adds to both scores. `sentence-order` is
    the cross-entropy of each order alone. This loss trains that number to be 0, so that the
    service's probabilities are calibrated.

    Because of the factor 1/2, both losses have the same optimum. If p is the probability of A
    before B, given their content, s(A, B) = -s(B, A) = log(p / (1 - p)). Each loss is log 2 at
    chance. In `paired-order`, a pair counts as right if the right order has the higher score.
    """
    if logits is not _order_logits:
        mark_dynamic([batch.firsts])
    logits_2C2 = logits(model, batch.tokens, batch.firsts).float()
    odds_2C = (logits_2C2[:, 0] - logits_2C2[:, 1]).view(2, -1)
    is_pair_C = batch.labels.view(2, -1)[0] != IGNORED
    signs_21 = torch.tensor([[1.0], [-1.0]], device=odds_2C.device)
    signed_2C = (signs_21 * odds_2C)[:, is_pair_C]
    margin_C = signed_2C.mean(0)
    return {
        "sentence-order": LossSums(
            loss=F.softplus(-signed_2C).sum(),
            right=(signed_2C > 0).sum(),
            count=batch.counts["sentence-order"],
        ),
        "paired-order": LossSums(
            loss=F.softplus(-margin_C).sum(),
            right=(margin_C > 0).sum(),
            count=batch.counts["paired-order"],
        ),
    }
