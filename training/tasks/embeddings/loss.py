"""Embeddings in a run: configuration, micro-batches, losses and validation.

An embedding is the normalised mean of a text's hidden states, as the service returns it. Embeddings
have no head: training changes only the encoder.

Shape legend: C sequences, T tokens of a batch, H hidden size, Q examples, K texts of an example.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from albert_serve.bundle.sentence_vectors import SentenceVectors
from training.data.batch import ExampleBatch, LossName, MicroBatch, TokenisedExample
from training.data.collate import collate_examples
from training.data.packing import best_row_length
from training.data.streams import NUM_SAMPLED_BATCHES, ExampleStream
from training.errors import RunError
from training.loop.validation import Validation
from training.losses import LogitsFunction, LossFunction, LossSums
from training.model.heads import AlbertForTasks, Task
from training.tasks.base import TRAINING, VALIDATION, LongTexts, TrainingSetup, TrainingTask
from training.tasks.classification.files import LabelledText, labelled_examples
from training.tasks.embeddings.files import SimilarTexts, read_similar
from training.tasks.metrics import compute_metrics

TASK: Final = "embeddings"
VECTORS: Final = SentenceVectors(pooling="mean", normalize=True)
# The loss compares all examples of a micro-batch, so a step's examples must fit into memory.
_MAX_PASS_TOKENS: Final = 8192
# Cosines are multiplied by this before the softmax, as in sentence-transformers.
_SCALE: Final = 20.0
# Two texts are treated as equal if their cosine similarity is higher than this.
_MIN_EQUAL_COSINE: Final = 1 - 1e-4
_VALIDATION_BATCH_SIZE: Final = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingConfig:
    """The configuration of embeddings in a run.

    Attributes:
        files: files of pairs, triplets, or pairs with a score.
        validation: files of held-out pairs with a score.
        columns: names of the text and score columns, or empty for the default names.
    """

    files: Sequence[Path]
    validation: Sequence[Path]
    columns: Sequence[str]


def read_vectors(config: EmbeddingConfig, setup: TrainingSetup, batch_size: int) -> TrainingTask:
    """Read and tokenise the texts for training, and the held-out pairs with scores."""
    splits = {TRAINING: read_similar(config.files, config.columns)}
    if config.validation:
        splits[VALIDATION] = read_similar(config.validation, config.columns)
        if splits[VALIDATION][0].kind != "scored pairs":
            raise RunError("--validation of embeddings requires pairs with a score.")
    loss = _cosent_loss if splits[TRAINING][0].kind == "scored pairs" else _ranking_loss
    vectors = setup.compiled(sentence_vectors)
    examples, long_texts = _tokenised(splits, setup)
    return TrainingTask(
        name=TASK,
        streams=(_stream(examples[TRAINING], setup, batch_size),),
        losses={TASK: partial(_vector_loss, loss=partial(loss, vectors=vectors), vectors=vectors)},
        validation=_validation(examples.get(VALIDATION, ()), setup.row_length),
        metric="spearman",
        long_texts=long_texts,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class VectorExample:
    """The tokens of an example's K texts, and the target of its loss.

    Attributes:
        target: score of a scored pair, or 0 for pairs and triplets.
    """

    texts: tuple[TokenisedExample, ...]
    target: float

    @property
    def lengths(self) -> list[int]:
        """The number of tokens in each text."""
        return [len(text.ids) for text in self.texts]


def _tokenised(
    splits: Mapping[str, Sequence[SimilarTexts]], setup: TrainingSetup
) -> tuple[dict[str, list[VectorExample]], LongTexts]:
    labelled = {  # the tokeniser takes labelled texts, but the label 0 is never read
        split: [
            LabelledText(text=text, pair=None, label=0, location=example.location)
            for example in texts
            for text in example.texts
        ]
        for split, texts in splits.items()
    }
    tokenised, long_texts = setup.tokenise(labelled, labelled_examples)
    return {
        split: list(_examples(texts, iter(tokenised[split]))) for split, texts in splits.items()
    }, long_texts


def _examples(
    texts: Sequence[SimilarTexts], tokenised: Iterator[TokenisedExample]
) -> Iterator[VectorExample]:
    """Yield the examples. `tokenised` yields the tokens of their texts, in order."""
    for text in texts:
        yield VectorExample(
            texts=tuple(next(tokenised) for _ in text.texts), target=text.score or 0.0
        )


def _collate(examples: Sequence[VectorExample], row_length: int) -> ExampleBatch:
    """Pack the texts of all examples in order. `firsts` and `sizes` are (Q * K,)."""
    texts = list(chain.from_iterable(example.texts for example in examples))
    return replace(
        collate_examples(TASK, texts, row_length=row_length),
        counts={TASK: len(examples)},
        targets=torch.tensor([example.target for example in examples]),
    )


@dataclass(kw_only=True)
class _VectorStream(ExampleStream[VectorExample]):
    """The task stream of embeddings.

    The losses compare each example with the other examples of its micro-batch, so a step has one
    micro-batch per process.
    """

    def __post_init__(self) -> None:
        """Check that the examples of a step fit into a micro-batch."""
        super().__post_init__()
        num_processes = self.division.world_size
        size = min(self.batch_size, len(self.examples)) // num_processes
        num_tokens = sum(map(self.size_of, self.examples)) / len(self.examples)
        max_size = min(self.division.micro_batch_size or size, int(_MAX_PASS_TOKENS / num_tokens))
        max_size = max(1, max_size)
        if size > max_size:
            raise RunError(
                f"The embedding loss compares all {size:,} examples of a step, but a "
                f"micro-batch has {max_size:,} at most (--micro-batch-size, or "
                f"{_MAX_PASS_TOKENS:,} tokens). Use --batch-size {max_size * num_processes}, or a "
                "shorter --length."
            )
        if num_processes > 1:
            print(
                f"The embedding loss compares the {size:,} examples within each process, but no "
                "examples across processes."
            )

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Empty, because embeddings train only the encoder."""
        return ()

    def passes(self, examples: Sequence[VectorExample]) -> Sequence[Sequence[VectorExample]]:
        """Return all examples as one micro-batch."""
        return [examples]

    def pack(self, examples: Sequence[VectorExample], row_length: int) -> MicroBatch:
        """Pack examples into one micro-batch."""
        return _collate(examples, row_length)


def _stream(
    examples: Sequence[VectorExample], setup: TrainingSetup, batch_size: int
) -> _VectorStream:
    """Return the task stream, packed into rows of the length that costs least."""
    rng = np.random.default_rng(setup.seed)
    lengths = [np.array(example.lengths) for example in examples]
    sample = rng.integers(len(lengths), size=(NUM_SAMPLED_BATCHES, batch_size))
    return _VectorStream(
        task=TASK,
        examples=examples,
        batch_size=batch_size,
        row_length=best_row_length(
            [np.concatenate([lengths[index] for index in batch]) for batch in sample],
            longest=max(sizes.max() for sizes in lengths),
            config=setup.architecture,
        ),
        seed=setup.seed,
        division=setup.division,
    )


def _validation(pairs: Sequence[VectorExample], row_length: int) -> Validation | None:
    """Return the validation on held-out pairs, or None without pairs."""
    if not pairs:
        return None
    longest = max(row_length, *(max(pair.lengths) for pair in pairs))
    return Validation(
        batches=[
            _collate(pairs[begin : begin + _VALIDATION_BATCH_SIZE], longest)
            for begin in range(0, len(pairs), _VALIDATION_BATCH_SIZE)
        ],
        tasks=(TASK,),
        metrics={TASK: _correlations},
    )


def _correlations(cosines_Q1: Tensor, scores_Q: Tensor) -> dict[str, float]:
    return compute_metrics(("spearman", "pearson"), cosines_Q1.numpy(), scores_Q.numpy())


def sentence_vectors(model: AlbertForTasks, batch: ExampleBatch) -> Tensor:
    """Return the normalised mean (C, H) of the hidden states of each sequence."""
    hidden_TH = model(batch.tokens).flatten(0, 1).float()
    positions_T = torch.arange(len(hidden_TH), device=hidden_TH.device)
    ends_C = batch.firsts + batch.sizes
    is_in_CT = (positions_T >= batch.firsts[:, None]) & (positions_T < ends_C[:, None])
    # Sums in bf16 are too coarse for a mean.
    with torch.autocast(hidden_TH.device.type, enabled=False):
        return F.normalize(is_in_CT.float() @ hidden_TH, dim=-1)


def _vector_loss(
    model: AlbertForTasks, batch: ExampleBatch, loss: LossFunction, vectors: LogitsFunction
) -> Mapping[LossName, LossSums]:
    """Return the training loss or, for held-out pairs, the squared errors of their cosines."""
    if model.training:
        return loss(model, batch)
    cosines_Q = _cosines(vectors(model, batch), batch)
    return {
        TASK: LossSums(
            loss=(cosines_Q - batch.targets).square().sum(),
            right=cosines_Q.new_zeros(()),
            count=len(cosines_Q),
            logits=cosines_Q[:, None],
            targets=batch.targets,
        )
    }


def _by_example(vectors_CH: Tensor, batch: ExampleBatch) -> Tensor:
    """Return the vectors (Q, K, H) of each example's texts."""
    return vectors_CH.view(len(batch.targets), -1, vectors_CH.shape[-1])


def _cosines(vectors_CH: Tensor, batch: ExampleBatch) -> Tensor:
    """Return the cosine (Q,) of each example's two texts."""
    firsts_QH, seconds_QH = _by_example(vectors_CH, batch).unbind(1)
    return (firsts_QH * seconds_QH).sum(-1)


def _ranking_loss(
    model: AlbertForTasks, batch: ExampleBatch, vectors: LogitsFunction
) -> dict[LossName, LossSums]:
    """Return the cross-entropy of finding an anchor's positive among the texts of the batch.

    This is sentence-transformers' MultipleNegativesRankingLoss (Henderson et al. 2017, section
    4.4), except that texts equal to the positive are ignored.
    """
    vectors_QKH = _by_example(vectors(model, batch), batch)
    anchors_QH = vectors_QKH[:, 0]
    candidates_NH = vectors_QKH[:, 1:].transpose(0, 1).flatten(0, 1)  # the positives first
    indices_Q = torch.arange(len(anchors_QH), device=anchors_QH.device)
    is_equal_QN = candidates_NH[: len(indices_Q)] @ candidates_NH.T > _MIN_EQUAL_COSINE
    is_equal_QN[indices_Q, indices_Q] = False
    logits_QN = (_SCALE * anchors_QH @ candidates_NH.T).masked_fill(is_equal_QN, -torch.inf)
    return {
        TASK: LossSums(
            loss=F.cross_entropy(logits_QN, indices_Q, reduction="sum"),
            right=(logits_QN.argmax(-1) == indices_Q).sum(),
            count=len(indices_Q),
        )
    }


def _cosent_loss(
    model: AlbertForTasks, batch: ExampleBatch, vectors: LogitsFunction
) -> dict[LossName, LossSums]:
    """Return a loss that is low if the cosines of the pairs are in the order of their scores.

    This is sentence-transformers' CoSENTLoss over the batch. The accuracy is the fraction of
    compared pairs that are in the right order.
    """
    cosines_Q = _cosines(vectors(model, batch), batch)
    is_less_QQ = batch.targets[:, None] < batch.targets
    differences = (cosines_Q[:, None] - cosines_Q)[is_less_QQ]
    loss = F.pad(_SCALE * differences, (1, 0)).logsumexp(0)
    right = (differences < 0).sum() / max(len(differences), 1)
    count = len(cosines_Q)
    return {TASK: LossSums(loss=loss * count, right=right * count, count=count)}
