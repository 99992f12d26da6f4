"""What each task feeds to finetuning: batches, and their score.

Shape legend: B sequences, S positions, H hidden size, K outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, count

import numpy as np
import torch
from numpy.typing import NDArray

from albert_serve.tokenizer import AlbertTokenizer
from training.datasets import LabelledText
from training.examples import PretrainBatch, build_examples, epoch_order
from training.heads import AlbertForTasks, Task
from training.losses import Score, pretrain_scores, score
from training.masking import NgramMasking
from training.model import Batch
from training.run import RunError
from training.shards import Shards
from training.spans import SpanExample

# Batches of like lengths are cut from so many batches' worth of examples at a time.
_BATCHES_SORTED_TOGETHER = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """What one batch gave: the score of each head that it trains, and its real tokens."""

    scores: Mapping[Task, Score]
    num_tokens: int


Scorer = Callable[[AlbertForTasks, torch.device], Scored]


@dataclass(frozen=True, kw_only=True, slots=True)
class Feed:
    """An endless stream of batches for the heads of `tasks`, the same for the same seed."""

    name: str
    tasks: tuple[Task, ...]
    scorers: Iterator[Scorer]


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledExample:
    """A tokenised text and its label."""

    ids: list[int]
    types: list[int]
    label: int


def classification_feed(
    examples: Sequence[LabelledExample], *, tokens_a_batch: int, seed: int
) -> Feed:
    """Texts and their labels; cross-entropy over the pooled [CLS] row."""
    lengths = [len(example.ids) for example in examples]
    batches = like_lengths(lengths, tokens_a_batch=tokens_a_batch, seed=seed)
    return Feed(
        name="text-classification",
        tasks=("text-classification",),
        scorers=(partial(classification_scores, [examples[i] for i in batch]) for batch in batches),
    )


def span_feed(examples: Sequence[SpanExample], *, tokens_a_batch: int, seed: int) -> Feed:
    """Questions and where their answers are; cross-entropy over positions, start and end."""
    lengths = [len(example.ids) for example in examples]
    batches = like_lengths(lengths, tokens_a_batch=tokens_a_batch, seed=seed)
    return Feed(
        name="question-answering",
        tasks=("question-answering",),
        scorers=(partial(_span_scores, [examples[i] for i in batch]) for batch in batches),
    )


def pretrain_feed(
    shards: Shards, masking: NgramMasking, *, length: int, batch_size: int, seed: int
) -> Feed:
    """Masked tokens and sentence order.

    Raises:
        RunError: the corpus does not fill one batch.
    """
    batches = pretrain_batches(shards, masking, length=length, batch_size=batch_size, seed=seed)
    first = next(batches)  # here, so that a corpus too small is told before a run begins
    return Feed(
        name="pretraining",
        tasks=("fill-mask", "sentence-order"),
        scorers=(partial(_pretrain_scores, make) for make in chain([first], batches)),
    )


def classification_scores(
    chosen: Sequence[LabelledExample], model: AlbertForTasks, device: torch.device
) -> Scored:
    """The score of one batch of labelled texts."""
    hidden_BSH = model(pad([(e.ids, e.types) for e in chosen]).to(device))
    logits_BK = model.logits("text-classification", hidden_BSH[:, 0])
    labels_B = torch.tensor([e.label for e in chosen], device=device)
    return Scored(
        scores={"text-classification": score(logits_BK, labels_B)},
        num_tokens=sum(len(e.ids) for e in chosen),
    )


def _span_scores(
    chosen: Sequence[SpanExample], model: AlbertForTasks, device: torch.device
) -> Scored:
    batch = pad([(e.ids, e.types) for e in chosen]).to(device)
    hidden_BSH = model(batch)
    logits_BS2 = model.logits("question-answering", hidden_BSH).float()
    assert batch.lengths is not None
    padded_BS = torch.arange(hidden_BSH.shape[1], device=device) >= batch.lengths[:, None]
    start_BS, end_BS = logits_BS2.masked_fill(padded_BS[..., None], -torch.inf).unbind(-1)
    start = score(start_BS, torch.tensor([e.start for e in chosen], device=device))
    end = score(end_BS, torch.tensor([e.end for e in chosen], device=device))
    # Start and end are halves of one prediction (the original's run_squad).
    loss, right = (start.loss + end.loss) / 2, (start.right + end.right) / 2
    return Scored(
        scores={"question-answering": Score(loss=loss, right=right, count=start.count)},
        num_tokens=sum(len(e.ids) for e in chosen),
    )


def _pretrain_scores(
    make: Callable[[], PretrainBatch], model: AlbertForTasks, device: torch.device
) -> Scored:
    batch = make()
    masked, order = pretrain_scores(model, batch.to(device))
    assert batch.tokens.lengths is not None
    return Scored(
        scores={"fill-mask": masked, "sentence-order": order},
        num_tokens=int(batch.tokens.lengths.sum()),
    )


def pretrain_batches(
    shards: Shards, masking: NgramMasking, *, length: int, batch_size: int, seed: int
) -> Iterator[Callable[[], PretrainBatch]]:
    """Batches of pretraining without end, epoch after epoch; each is made when it is called for.

    Raises:
        RunError: the corpus does not fill one batch.
    """
    epoch = 0
    while True:
        examples = build_examples(shards, masking, length=length, seed=seed, epoch=epoch)
        num_batches = len(examples) // batch_size
        if not num_batches:
            raise RunError(
                f"the corpus gives {len(examples)} examples, less than one batch of {batch_size}; "
                "give more text or a smaller batch"
            )
        order = epoch_order(len(examples), seed=seed, epoch=epoch)[: num_batches * batch_size]
        for indices in order.reshape(num_batches, batch_size):
            yield partial(examples.batch, indices)
        epoch += 1


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
