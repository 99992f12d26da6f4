"""Task streams: the micro-batches of each training step, and their scores.

Shape legend: B sequences, S positions, H hidden size, K outputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import nn

from albert_serve.tasks.grouping import cut_batches
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
    # These import corpus readers, which a run on shards does not need.
    from training.data.datasets import LabelledText
    from training.data.windows import SpanExample

# Examples are sorted by length within this number of batches.
_BATCHES_SORTED_TOGETHER = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """One micro-batch: a batch that goes through the model in one forward pass.

    Attributes:
        num_tokens: real tokens.
        counts: number of predictions of each loss.
        scores: runs the model on the batch, on the given device, and returns the scores.
    """

    num_tokens: int
    counts: Mapping[LossName, int]
    scores: Callable[[AlbertForTasks, torch.device], Mapping[LossName, Score]]


class Objective(nn.Module):
    """A model and its losses as one module, which DDP and FSDP wrap."""

    def __init__(self, model: AlbertForTasks, device: torch.device) -> None:
        super().__init__()
        self.model = model
        self.device = device

    def forward(self, micro_batch: MicroBatch) -> Mapping[LossName, Score]:
        """Return the scores of one micro-batch."""
        return micro_batch.scores(self.model, self.device)


class Feed(Protocol):
    """An endless task stream: the micro-batches of each step, determined by the seed."""

    @property
    def name(self) -> str:
        """The name, unique among a run's task streams."""

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks whose heads it trains."""

    @property
    def losses(self) -> tuple[LossName, ...]:
        """The losses of its micro-batches: those of the tasks, and additional ones."""

    def step(self) -> Sequence[MicroBatch]:
        """Return this process' micro-batches of the next step."""

    def state(self) -> list[int]:
        """Return the position of the next step."""

    def restore(self, state: Sequence[int]) -> None:
        """Move to a saved position, forwards or backwards."""


@dataclass(kw_only=True)
class BatchFeed:
    """Task stream with one micro-batch a step, from an iterator that can be restarted.

    Attributes:
        stream: returns an iterator over the micro-batches from the first on.
    """

    name: str
    tasks: tuple[Task, ...]
    stream: Callable[[], Iterator[MicroBatch]]
    _num_taken: int = 0
    _micro_batches: Iterator[MicroBatch] | None = None

    @property
    def losses(self) -> tuple[LossName, ...]:
        """The losses of its tasks."""
        return self.tasks

    def step(self) -> Sequence[MicroBatch]:
        """Return the next micro-batch."""
        if self._micro_batches is None:
            self._micro_batches = self.stream()
        self._num_taken += 1
        return [next(self._micro_batches)]

    def state(self) -> list[int]:
        """Return the number of micro-batches taken so far."""
        return [self._num_taken]

    def restore(self, state: Sequence[int]) -> None:
        """Skip the micro-batches taken before."""
        (self._num_taken,) = state
        self._micro_batches = islice(self.stream(), self._num_taken, None)


@dataclass(kw_only=True)
class PlannedFeed(ABC, Generic[Made]):
    """Task stream over the packed rows of a plan.

    Attributes:
        num_workers: number of data loader workers.
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
        """The tasks whose heads it trains."""
        if self.plan.settings.sentence_task == "none":
            return ("fill-mask",)
        return ("fill-mask", "sentence-order")

    @property
    def losses(self) -> tuple[LossName, ...]:
        """The losses of its tasks."""
        return self.tasks

    def step(self) -> Sequence[MicroBatch]:
        """Return this process' micro-batches of the next step.

        Raises:
            TrainingError: the corpus yields no example.
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
        return [self.make_micro_batch(batch) for batch in batches]

    @abstractmethod
    def make_micro_batch(self, batch: Made) -> MicroBatch:
        """Return a collated batch as a micro-batch."""

    def state(self) -> list[int]:
        """Return epoch, window and row of the next step."""
        return list(self._position)

    def restore(self, state: Sequence[int]) -> None:
        """Move to that epoch, window and row."""
        self._position = Position(*state)
        self._steps = None


@dataclass(kw_only=True)
class PretrainFeed(PlannedFeed[PretrainBatch]):
    """Task stream of pretraining: masked tokens and the sentence task.

    Attributes:
        sums: `pretrain_sums`, optionally compiled.
    """

    sums: Callable[..., PretrainSums] = pretrain_sums

    def make_micro_batch(self, batch: PretrainBatch) -> MicroBatch:
        """Return a collated batch as a micro-batch."""
        return pretrain_micro_batch(batch, self.tasks, self.sums)


def pretrain_micro_batch(
    batch: PretrainBatch,
    tasks: tuple[Task, ...],
    sums: Callable[..., PretrainSums] = pretrain_sums,
) -> MicroBatch:
    """Return a batch of pretraining as a micro-batch."""
    counts = counts_of(batch)
    return MicroBatch(
        num_tokens=batch.num_tokens,
        counts={task: counts[task] for task in tasks},
        scores=lambda model, device: pretrain_scores(model, batch.to(device), sums),
    )


def counts_of(batch: PretrainBatch) -> dict[LossName, int]:
    """Return the number of predictions in a batch of pretraining, by the loss' name."""
    return {"fill-mask": batch.num_masked, "sentence-order": batch.num_pairs}


class TokenisedExample(Protocol):
    """An example of a task, with the tokens of one sequence."""

    @property
    def ids(self) -> list[int]:
        """The token ids."""


Tokenised = TypeVar("Tokenised", bound=TokenisedExample)


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledExample:
    """A tokenised text and its label."""

    ids: list[int]
    types: list[int]
    label: int


def classification_feed(
    examples: Sequence[LabelledExample], *, tokens_a_batch: int, seed: int
) -> BatchFeed:
    """Return the task stream of text classification: cross-entropy over the pooled [CLS] row."""
    return bucketed_feed(
        "text-classification",
        examples,
        classification_micro_batch,
        tokens_a_batch=tokens_a_batch,
        seed=seed,
    )


def span_feed(examples: Sequence[SpanExample], *, tokens_a_batch: int, seed: int) -> BatchFeed:
    """Return the task stream of question answering: cross-entropy of start and end positions."""
    return bucketed_feed(
        "question-answering",
        examples,
        _span_micro_batch,
        tokens_a_batch=tokens_a_batch,
        seed=seed,
    )


def bucketed_feed(
    task: Task,
    examples: Sequence[Tokenised],
    make: Callable[[list[Tokenised]], MicroBatch],
    *,
    tokens_a_batch: int,
    seed: int,
) -> BatchFeed:
    """Return the task stream of examples of one task, in micro-batches bucketed by length."""
    lengths = [len(example.ids) for example in examples]
    batches = partial(like_lengths, lengths, tokens_a_batch=tokens_a_batch, seed=seed)
    return BatchFeed(
        name=task,
        tasks=(task,),
        stream=lambda: (make([examples[index] for index in batch]) for batch in batches()),
    )


def example_micro_batch(
    task: Task,
    examples: Sequence[TokenisedExample],
    scores: Callable[[AlbertForTasks, torch.device], Mapping[LossName, Score]],
) -> MicroBatch:
    """Return a micro-batch with one prediction for each example."""
    return MicroBatch(
        num_tokens=sum(len(example.ids) for example in examples),
        counts={task: len(examples)},
        scores=scores,
    )


def classification_micro_batch(examples: Sequence[LabelledExample]) -> MicroBatch:
    """Return a micro-batch of labelled texts."""
    return example_micro_batch(
        "text-classification", examples, partial(_classification_scores, examples)
    )


def _classification_scores(
    examples: Sequence[LabelledExample], model: AlbertForTasks, device: torch.device
) -> Mapping[LossName, Score]:
    hidden_BSH = model(pad([(e.ids, e.types) for e in examples]).to(device))
    logits_BK = model.logits("text-classification", hidden_BSH[:, 0])
    labels_B = torch.tensor([e.label for e in examples], device=device)
    return {"text-classification": score(logits_BK, labels_B, len(examples))}


def _span_micro_batch(examples: Sequence[SpanExample]) -> MicroBatch:
    return example_micro_batch("question-answering", examples, partial(_span_scores, examples))


def _span_scores(
    examples: Sequence[SpanExample], model: AlbertForTasks, device: torch.device
) -> Mapping[LossName, Score]:
    batch = pad([(e.ids, e.types) for e in examples]).to(device)
    logits_BS2 = model.logits("question-answering", model(batch)).float()
    masked_BS2 = logits_BS2.masked_fill(~batch.real_BS[..., None], -torch.inf)
    start, end = (
        score(logits_BS, torch.tensor(targets, device=device), len(examples))
        for logits_BS, targets in (
            (masked_BS2[..., 0], [e.start for e in examples]),
            (masked_BS2[..., 1], [e.end for e in examples]),
        )
    )
    # Start and end are halves of one prediction (the original's run_squad).
    loss, right = (start.loss + end.loss) / 2, (start.right + end.right) / 2
    return {"question-answering": Score(loss=loss, right=right, count=len(examples))}


def labelled_examples(
    texts: Sequence[LabelledText], tokenizer: AlbertTokenizer, *, length: int
) -> tuple[list[LabelledExample], int]:
    """Tokenise the texts, drop those over `length` tokens, and return how many were dropped."""
    encoded = [(tokenizer.encode(text.text, text.pair), text.label) for text in texts]
    kept = [
        LabelledExample(ids=encoding.ids, types=encoding.types, label=label)
        for encoding, label in encoded
        if len(encoding) <= length
    ]
    return kept, len(encoded) - len(kept)


def pad(sequences: Sequence[tuple[list[int], list[int]]]) -> Batch:
    """Collate ids and types into a batch, padded on the right to the longest."""
    lengths = torch.tensor([len(ids) for ids, _ in sequences])
    shape = (len(sequences), int(lengths.max()))
    ids, types = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    for row, (row_ids, row_types) in enumerate(sequences):
        ids[row, : len(row_ids)] = torch.tensor(row_ids)
        types[row, : len(row_types)] = torch.tensor(row_types)
    return Batch(ids=ids, types=types, lengths=lengths)


def like_lengths(lengths: Sequence[int], *, tokens_a_batch: int, seed: int) -> Iterator[list[int]]:
    """Yield batches of indices, bucketed by length, without end; each epoch in another order."""
    sizes = np.asarray(lengths)
    pool = max(1, _BATCHES_SORTED_TOGETHER * tokens_a_batch // int(sizes.mean()))
    for epoch in count():
        rng = np.random.default_rng([seed, epoch])
        order = rng.permutation(len(sizes))
        batches: list[list[int]] = []
        for begin in range(0, len(order), pool):
            part = order[begin : begin + pool]
            ascending = part[np.argsort(sizes[part], kind="stable")]
            batches += cut_batches(ascending.tolist(), sizes, tokens_a_batch)
        yield from (batches[index] for index in rng.permutation(len(batches)))
