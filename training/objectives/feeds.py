"""What each task feeds to training: the passes of each step, and their scores.

Shape legend: B sequences, S positions, H hidden size, K outputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice
from typing import TYPE_CHECKING, Generic, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from albert_serve.tokenizer import AlbertTokenizer
from training.data.collate import Collate, Made, PretrainBatch, Slicing, load_steps
from training.data.packing import Plan, Position
from training.model.albert import Batch
from training.model.heads import AlbertForTasks, Task
from training.objectives.losses import (
    LossName,
    PretrainSums,
    Score,
    pretrain_scores,
    pretrain_sums,
    score,
)

if TYPE_CHECKING:
    # They import readers of corpora, which a run on shards does not need.
    from training.data.datasets import LabelledText
    from training.data.windows import SpanExample

# Batches of like lengths are cut from so many batches' worth of examples at a time.
_BATCHES_SORTED_TOGETHER = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """One pass through the model.

    Attributes:
        num_tokens: real tokens in its batch.
        counts: predictions that each loss is taken over.
        scores: puts the batch through the model, on this device.
    """

    num_tokens: int
    counts: Mapping[LossName, int]
    scores: Callable[[AlbertForTasks, torch.device], Mapping[LossName, Score]]


class Objective(nn.Module):
    """A model and its losses as one module, which is what processes share their work around."""

    def __init__(self, model: AlbertForTasks, device: torch.device) -> None:
        super().__init__()
        self.model = model
        self.device = device

    def forward(self, one: Pass) -> Mapping[LossName, Score]:
        """The scores of one pass."""
        return one.scores(self.model, self.device)


class Feed(Protocol):
    """An endless stream of steps, the same for the same seed."""

    @property
    def name(self) -> str:
        """Tells it from a run's other feeds."""

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The heads that it trains."""

    @property
    def losses(self) -> tuple[LossName, ...]:
        """The losses of its passes: those of the heads, and others that it adds."""

    def step(self) -> Sequence[Pass]:
        """The passes that this process takes in the next step."""

    def state(self) -> list[int]:
        """Where the next step begins."""

    def go_to(self, state: Sequence[int]) -> None:
        """Go on from a state; the feed must stand at its beginning, or behind it be let go."""


@dataclass(kw_only=True)
class BatchFeed:
    """Steps of one pass each, from a stream of batches that can be begun anew.

    Attributes:
        stream: gives the passes from the first on.
    """

    name: str
    tasks: tuple[Task, ...]
    stream: Callable[[], Iterator[Pass]]
    _num_taken: int = 0
    _passes: Iterator[Pass] | None = None

    @property
    def losses(self) -> tuple[LossName, ...]:
        """Those of its heads."""
        return self.tasks

    def step(self) -> Sequence[Pass]:
        """The next pass."""
        if self._passes is None:
            self._passes = self.stream()
        self._num_taken += 1
        return [next(self._passes)]

    def state(self) -> list[int]:
        """Passes taken so far."""
        return [self._num_taken]

    def go_to(self, state: Sequence[int]) -> None:
        """Pass over so many."""
        (self._num_taken,) = state
        self._passes = islice(self.stream(), self._num_taken, None)


@dataclass(kw_only=True)
class PlannedFeed(ABC, Generic[Made]):
    """Steps over the packed rows of a plan.

    Attributes:
        num_workers: processes that make batches ahead.
    """

    plan: Plan
    collate: Collate[Made]
    slicing: Slicing
    num_workers: int = 0
    name: str = "pretraining"
    _position: Position = field(default_factory=Position)
    _steps: Iterator[tuple[list[Made], Position]] | None = None

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The heads that it trains."""
        if self.plan.settings.sentence_task == "none":
            return ("fill-mask",)
        return ("fill-mask", "sentence-order")

    @property
    def losses(self) -> tuple[LossName, ...]:
        """Those of its heads."""
        return self.tasks

    def step(self) -> Sequence[Pass]:
        """The passes that this process takes in the next step.

        Raises:
            TrainingError: the corpus gives no example.
        """
        if self._steps is None:
            self._steps = load_steps(
                self.plan,
                self.collate,
                self.slicing,
                self._position,
                num_workers=self.num_workers,
            )
        batches, self._position = next(self._steps)
        return [self.make_pass(batch) for batch in batches]

    @abstractmethod
    def make_pass(self, batch: Made) -> Pass:
        """A batch as a pass."""

    def state(self) -> list[int]:
        """Epoch, window and row."""
        return list(self._position)

    def go_to(self, state: Sequence[int]) -> None:
        """Go on from there."""
        self._position = Position(*state)
        self._steps = None


@dataclass(kw_only=True)
class PretrainFeed(PlannedFeed[PretrainBatch]):
    """Masked tokens and the sentence task.

    Attributes:
        sums: `pretrain_sums`, which may be compiled.
    """

    sums: Callable[..., PretrainSums] = pretrain_sums

    def make_pass(self, batch: PretrainBatch) -> Pass:
        """A batch as a pass."""
        return pretrain_pass(batch, self.tasks, self.sums)


def pretrain_pass(
    batch: PretrainBatch,
    tasks: tuple[Task, ...],
    sums: Callable[..., PretrainSums] = pretrain_sums,
) -> Pass:
    """A batch of pretraining as a pass."""
    counts = counts_of(batch)
    return Pass(
        num_tokens=batch.num_tokens,
        counts={task: counts[task] for task in tasks},
        scores=lambda model, device: pretrain_scores(model, batch.to(device), sums),
    )


def counts_of(batch: PretrainBatch) -> dict[LossName, int]:
    """The predictions of a batch of pretraining, by the loss' name."""
    return {"fill-mask": batch.num_masked, "sentence-order": batch.num_pairs}


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledExample:
    """A tokenised text and its label."""

    ids: list[int]
    types: list[int]
    label: int


def classification_feed(
    examples: Sequence[LabelledExample], *, tokens_a_batch: int, seed: int
) -> BatchFeed:
    """Texts and their labels; cross-entropy over the pooled [CLS] row."""
    lengths = [len(example.ids) for example in examples]
    batches = partial(like_lengths, lengths, tokens_a_batch=tokens_a_batch, seed=seed)
    return BatchFeed(
        name="text-classification",
        tasks=("text-classification",),
        stream=lambda: (classification_pass([examples[i] for i in batch]) for batch in batches()),
    )


def span_feed(examples: Sequence[SpanExample], *, tokens_a_batch: int, seed: int) -> BatchFeed:
    """Questions and where their answers are; cross-entropy over positions, start and end."""
    lengths = [len(example.ids) for example in examples]
    batches = partial(like_lengths, lengths, tokens_a_batch=tokens_a_batch, seed=seed)
    return BatchFeed(
        name="question-answering",
        tasks=("question-answering",),
        stream=lambda: (_span_pass([examples[i] for i in batch]) for batch in batches()),
    )


def classification_pass(chosen: Sequence[LabelledExample]) -> Pass:
    """One batch of labelled texts."""
    return Pass(
        num_tokens=sum(len(e.ids) for e in chosen),
        counts={"text-classification": len(chosen)},
        scores=partial(_classification_scores, chosen),
    )


def _classification_scores(
    chosen: Sequence[LabelledExample], model: AlbertForTasks, device: torch.device
) -> Mapping[LossName, Score]:
    hidden_BSH = model(pad([(e.ids, e.types) for e in chosen]).to(device))
    logits_BK = model.logits("text-classification", hidden_BSH[:, 0])
    labels_B = torch.tensor([e.label for e in chosen], device=device)
    return {"text-classification": score(logits_BK, labels_B, len(chosen))}


def _span_pass(chosen: Sequence[SpanExample]) -> Pass:
    return Pass(
        num_tokens=sum(len(e.ids) for e in chosen),
        counts={"question-answering": len(chosen)},
        scores=partial(_span_scores, chosen),
    )


def _span_scores(
    chosen: Sequence[SpanExample], model: AlbertForTasks, device: torch.device
) -> Mapping[LossName, Score]:
    batch = pad([(e.ids, e.types) for e in chosen]).to(device)
    logits_BS2 = model.logits("question-answering", model(batch)).float()
    masked_BS2 = logits_BS2.masked_fill(~batch.real_BS[..., None], -torch.inf)
    start, end = (
        score(logits_BS, torch.tensor(targets, device=device), len(chosen))
        for logits_BS, targets in (
            (masked_BS2[..., 0], [e.start for e in chosen]),
            (masked_BS2[..., 1], [e.end for e in chosen]),
        )
    )
    # Start and end are halves of one prediction (the original's run_squad).
    loss, right = (start.loss + end.loss) / 2, (start.right + end.right) / 2
    return {"question-answering": Score(loss=loss, right=right, count=len(chosen))}


def labelled_examples(
    texts: Sequence[LabelledText], tokenizer: AlbertTokenizer, *, length: int
) -> tuple[list[LabelledExample], int]:
    """Tokenise; also returns how many texts are over `length` tokens and were left out."""
    encoded = [(tokenizer.encode(text.text, text.pair), text.label) for text in texts]
    kept = [
        LabelledExample(ids=encoding.ids, types=encoding.types, label=label)
        for encoding, label in encoded
        if len(encoding) <= length
    ]
    return kept, len(encoded) - len(kept)


def pad(sequences: Sequence[tuple[list[int], list[int]]]) -> Batch:
    """Ids and types, padded on the right to the longest."""
    lengths = torch.tensor([len(ids) for ids, _ in sequences])
    shape = (len(sequences), int(lengths.max()))
    ids, types = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    for line, (given_ids, given_types) in enumerate(sequences):
        ids[line, : len(given_ids)] = torch.tensor(given_ids)
        types[line, : len(given_types)] = torch.tensor(given_types)
    return Batch(ids=ids, types=types, lengths=lengths)


def like_lengths(lengths: Sequence[int], *, tokens_a_batch: int, seed: int) -> Iterator[list[int]]:
    """Indices of batches of like lengths without end; each epoch in another order."""
    sizes = np.asarray(lengths)
    pool = max(1, _BATCHES_SORTED_TOGETHER * tokens_a_batch // int(sizes.mean()))
    for epoch in count():
        rng = np.random.default_rng([seed, epoch])
        order = rng.permutation(len(sizes))
        batches: list[list[int]] = []
        for begin in range(0, len(order), pool):
            part = order[begin : begin + pool]
            batches += cut_batches(
                part[np.argsort(sizes[part], kind="stable")], sizes, tokens_a_batch
            )
        yield from (batches[index] for index in rng.permutation(len(batches)))


def cut_batches(
    order: NDArray[np.int64], sizes: NDArray[np.int64], tokens_a_batch: int
) -> list[list[int]]:
    """Cut indices, ascending by size, into batches of at most so many tokens with padding."""
    batches: list[list[int]] = []
    batch: list[int] = []
    for index in order.tolist():
        if batch and (len(batch) + 1) * int(sizes[index]) > tokens_a_batch:
            batches.append(batch)
            batch = []
        batch.append(index)
    return [*batches, batch] if batch else batches
