"""Sentence vectors of a finetuning run: their texts, their losses, and validation on them.

A vector is the mean of a text's hidden states, normalised, as the service returns it. There is no
head: the layers themselves learn it.

Shape legend: C sequences, T tokens of a batch, H hidden size, Q examples, K texts of an example.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, ClassVar, Final, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from albert_serve.bundle.sentence_vectors import SentenceVectors
from albert_serve.tokenizer import AlbertTokenizer
from training.data.batch import ExampleBatch, LossName, MicroBatch, TokenisedExample
from training.data.collate import collate_examples
from training.data.labelled.texts import LabelledText
from training.data.packing import best_row_length
from training.data.similar import SimilarTexts, TextKind, read_similar
from training.data.streams import (
    BATCHES_SAMPLED,
    ExampleStream,
    TaskStream,
    labelled_examples,
)
from training.errors import RunError
from training.evaluation.metrics import metric_figures
from training.evaluation.validation import Validation
from training.finetuning.config import EmbeddingLoss, FinetuneConfig
from training.finetuning.data import TRAINING, VALIDATION, LongTexts, division_of, tokenise
from training.finetuning.start import Start
from training.loop.distributed import World
from training.losses import LogitsFunction, LossFunction, LossSums, compile_logits
from training.model.heads import AlbertForTasks, Task

TASK: Final = "embeddings"
VECTORS: Final = SentenceVectors(pooling="mean", normalize=True)
# Most tokens of a micro-batch, on average where its examples are compared with each other.
_TOKENS_A_PASS: Final = 8192
# Cosines are multiplied by it before a softmax, as in sentence-transformers.
_SCALE: Final = 20.0
# Least difference of the cosines of the two pairs of a triplet.
_MARGIN: Final = 0.5
# Texts whose vectors are this near each other are taken for the same one.
_SAME: Final = 1 - 1e-4
# The losses of each kind of texts, the default first.
_LOSSES: Final[dict[TextKind, tuple[EmbeddingLoss, ...]]] = {
    "pairs": ("MultipleNegativesRankingLoss",),
    "triplets": ("MultipleNegativesRankingLoss", "TripletLoss"),
    "scored pairs": ("CoSENTLoss", "CosineSimilarityLoss"),
}
_COMPARING: Final = ("MultipleNegativesRankingLoss", "CoSENTLoss")


@dataclass(frozen=True, kw_only=True, slots=True)
class VectorExample:
    """The tokens of an example's K texts, and the target of its loss.

    Attributes:
        target: a score, or 0 where the texts need none.
    """

    texts: tuple[TokenisedExample, ...]
    target: float

    @property
    def lengths(self) -> list[int]:
        """The tokens of each text."""
        return [len(text.ids) for text in self.texts]


def _collate(examples: Sequence[VectorExample], row_length: int) -> ExampleBatch:
    """Pack the texts of one example after the other: `firsts` and `sizes` are (Q * K,)."""
    texts = list(chain.from_iterable(example.texts for example in examples))
    return replace(
        collate_examples(TASK, texts, row_length=row_length),
        counts={TASK: len(examples)},
        targets=torch.tensor([example.target for example in examples]),
    )


@dataclass(kw_only=True)
class _VectorStream(ExampleStream[VectorExample]):
    """Task stream over texts whose vectors are learnt; it trains no head.

    Attributes:
        compares: whether the loss compares each example with the others of its micro-batch, so that
            a step's examples are one micro-batch of each process.

    Raises:
        RunError: the examples of a step are too many for that.
    """

    compares: bool

    def __post_init__(self) -> None:
        """Check that the examples that are compared fit into a micro-batch."""
        super().__post_init__()
        if self.compares:
            self._check_size()

    def _check_size(self) -> None:
        num_processes = self.division.world_size
        size = min(self.batch_size, len(self.examples)) // num_processes
        num_tokens = sum(map(self.size_of, self.examples)) / len(self.examples)
        most = min(self.division.micro_batch_size or size, int(_TOKENS_A_PASS / num_tokens))
        if size > max(1, most):
            raise RunError(
                f"embeddings: the loss compares the {size:,} examples of a step with each other, "
                f"and {max(1, most):,} fit into a micro-batch ({_TOKENS_A_PASS:,} tokens, or "
                f"--micro-batch-size). Give --batch-size {max(1, most) * num_processes}, or a "
                "shorter --length"
            )
        if num_processes > 1:
            print(
                f"embeddings: each process compares its {size:,} examples with each other, "
                "not with those of the other processes"
            )

    @property
    def tasks(self) -> tuple[Task, ...]:
        """None."""
        return ()

    def passes(self, examples: Sequence[VectorExample]) -> Sequence[Sequence[VectorExample]]:
        """Return examples in the parts that go through the model together, in random order."""
        num_passes = 1 if self.compares else -(-sum(map(self.size_of, examples)) // _TOKENS_A_PASS)
        return [examples[number::num_passes] for number in range(min(num_passes, len(examples)))]

    def pack(self, examples: Sequence[VectorExample], row_length: int) -> MicroBatch:
        """Return examples as one micro-batch."""
        return _collate(examples, row_length)


@dataclass(frozen=True, kw_only=True, slots=True)
class Embeddings:
    """The texts of a run whose vectors are learnt, their loss, and held-out pairs with scores.

    Attributes:
        losses: the loss function, by the name of the stream's micro-batches.
        figure: of validation, that decides.
        long_texts: those of training and validation.
    """

    name: ClassVar[Task] = TASK
    figure: ClassVar[str] = "spearman"
    streams: Sequence[TaskStream]
    losses: Mapping[str, LossFunction]
    held_out: Sequence[VectorExample]
    long_texts: LongTexts

    @classmethod
    def read(cls, config: FinetuneConfig, start: Start, world: World, batch_size: int) -> Self:
        """Read and tokenise the texts of `--embeddings`, and held-out pairs with scores.

        Raises:
            CorpusError: files cannot be read, or hold what cannot be learnt; all of it is listed.
            RunError: options do not fit the data.
        """
        texts = read_similar(config.embeddings, config.embedding_columns)
        vectors = compile_logits(sentence_vectors) if start.compiles else sentence_vectors
        loss_name = _loss_name(texts[0].kind, config.embedding_loss)
        _check_scores(texts, loss_name)
        splits = {TRAINING: texts}
        if config.has_held_out_vectors:
            splits[VALIDATION] = read_similar(config.validation, config.embedding_columns)
            if splits[VALIDATION][0].kind != "scored pairs":
                raise RunError("--validation of embeddings takes pairs with a score")
        examples, long_texts = _tokenised(splits, config, start.tokenizer)
        compares = loss_name in _COMPARING
        loss = partial(_LOSS_OF[loss_name], vectors=vectors)
        return cls(
            streams=(_stream(examples[TRAINING], config, start, world, batch_size, compares),),
            losses={TASK: partial(_vector_loss, training=loss, vectors=vectors)},
            held_out=examples.get(VALIDATION, ()),
            long_texts=long_texts,
        )

    def validation(self, *, every: int, row_length: int) -> Validation:
        """Return the validation on the held-out pairs."""
        longest = max((max(each.lengths) for each in self.held_out), default=row_length)
        return Validation(
            batches=[
                _collate(self.held_out[begin : begin + 64], max(row_length, longest))
                for begin in range(0, len(self.held_out), 64)
            ],
            every=every,
            tasks=(TASK,),
            metrics={TASK: _figures},
        )


def _stream(
    examples: Sequence[VectorExample],
    config: FinetuneConfig,
    start: Start,
    world: World,
    batch_size: int,
    compares: bool,
) -> _VectorStream:
    """Return the task stream, packed into rows of the length that costs least."""
    rng = np.random.default_rng(config.seed)
    lengths = [np.array(example.lengths) for example in examples]
    sample = rng.integers(len(lengths), size=(BATCHES_SAMPLED, batch_size))
    return _VectorStream(
        task=TASK,
        compares=compares,
        examples=examples,
        batch_size=batch_size,
        row_length=best_row_length(
            [np.concatenate([lengths[index] for index in batch]) for batch in sample],
            longest=max(sizes.max() for sizes in lengths),
            config=start.architecture,
        ),
        seed=config.seed,
        division=division_of(config, world),
    )


def _figures(cosines_Q1: Tensor, scores_Q: Tensor) -> dict[str, float]:
    return metric_figures(("spearman", "pearson"), cosines_Q1.numpy(), scores_Q.numpy())


def _loss_name(kind: TextKind, asked: EmbeddingLoss | None) -> EmbeddingLoss:
    allowed = _LOSSES[kind]
    if asked not in (None, *allowed):
        raise RunError(f"--embedding-loss {asked}: {kind} are learnt by {' or '.join(allowed)}")
    return asked or allowed[0]


def _check_scores(texts: Sequence[SimilarTexts], loss: EmbeddingLoss) -> None:
    if loss != "CosineSimilarityLoss":
        return
    for text in texts:
        if text.score is not None and not -1 <= text.score <= 1:
            raise RunError(
                f"{text.place}: CosineSimilarityLoss compares cosines with scores, from -1 to 1; "
                f"this one is {text.score:g}. Divide them, or take CoSENTLoss, which orders them"
            )


def _tokenised(
    splits: Mapping[str, Sequence[SimilarTexts]], config: FinetuneConfig, tokenizer: AlbertTokenizer
) -> tuple[dict[str, list[VectorExample]], LongTexts]:
    plain = {
        split: [
            LabelledText(text=each, pair=None, label=0, place=text.place)  # whose label is not read
            for text in texts
            for each in text.texts
        ]
        for split, texts in splits.items()
    }
    tokenised, long_texts = tokenise(plain, labelled_examples, config, tokenizer)
    return {
        split: list(_examples(texts, iter(tokenised[split]))) for split, texts in splits.items()
    }, long_texts


def _examples(
    texts: Sequence[SimilarTexts], tokenised: Iterator[TokenisedExample]
) -> Iterator[VectorExample]:
    """Yield the examples, each of the next of the tokenised texts."""
    for text in texts:
        yield VectorExample(
            texts=tuple(next(tokenised) for _ in text.texts),
            target=0.0 if text.score is None else text.score,
        )


def sentence_vectors(model: AlbertForTasks, batch: ExampleBatch) -> Tensor:
    """Return the normalised mean (C, H) of the hidden states of each sequence."""
    hidden_TH = model(batch.tokens).flatten(0, 1).float()
    places_T = torch.arange(len(hidden_TH), device=hidden_TH.device)
    ends_C = batch.firsts + batch.sizes
    is_in_CT = (places_T >= batch.firsts[:, None]) & (places_T < ends_C[:, None])
    # Not in bf16, whose sums are too coarse for a mean.
    with torch.autocast(hidden_TH.device.type, enabled=False):
        return F.normalize(is_in_CT.float() @ hidden_TH, dim=-1)


_VectorLoss: TypeAlias = dict[LossName, LossSums]


def _vector_loss(
    model: AlbertForTasks, batch: ExampleBatch, training: LossFunction, vectors: LogitsFunction
) -> _VectorLoss:
    """Return the loss of a batch by the loss of training; of held-out pairs their cosines."""
    if model.training:
        return dict(training(model, batch))
    cosines_Q = _cosines(_by_example(vectors(model, batch), batch))[:, 0]
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


def _cosines(vectors_QKH: Tensor) -> Tensor:
    """Return the cosines (Q, K - 1) of each example's first text with its others."""
    return (vectors_QKH[:, :1] * vectors_QKH[:, 1:]).sum(-1)


def _ranking_loss(
    model: AlbertForTasks, batch: ExampleBatch, vectors: LogitsFunction
) -> _VectorLoss:
    """Return the score of telling an anchor's positive from all other texts of the batch.

    MultipleNegativesRankingLoss of sentence-transformers (Henderson et al. 2017, section 4.4);
    texts equal to the positive are left out of the others.
    """
    vectors_QKH = _by_example(vectors(model, batch), batch)
    anchors_QH = vectors_QKH[:, 0]
    others_NH = vectors_QKH[:, 1:].transpose(0, 1).flatten(0, 1)  # the positives first
    every = torch.arange(len(anchors_QH), device=anchors_QH.device)
    is_same_QN = others_NH[: len(every)] @ others_NH.T > _SAME
    is_same_QN[every, every] = False
    logits_QN = (_SCALE * anchors_QH @ others_NH.T).masked_fill(is_same_QN, -torch.inf)
    return {
        TASK: LossSums(
            loss=F.cross_entropy(logits_QN, every, reduction="sum"),
            right=(logits_QN.argmax(-1) == every).sum(),
            count=len(every),
        )
    }


def _triplet_loss(
    model: AlbertForTasks, batch: ExampleBatch, vectors: LogitsFunction
) -> _VectorLoss:
    """Return the score of triplets: the positive's cosine is to be the negative's and a margin."""
    positives_Q, negatives_Q = _cosines(_by_example(vectors(model, batch), batch)).unbind(-1)
    return {
        TASK: LossSums(
            loss=(negatives_Q - positives_Q + _MARGIN).relu().sum(),
            right=(positives_Q > negatives_Q).sum(),
            count=len(positives_Q),
        )
    }


def _cosent_loss(
    model: AlbertForTasks, batch: ExampleBatch, vectors: LogitsFunction
) -> _VectorLoss:
    """Return the score of the order of cosines by their pairs' scores (CoSENTLoss).

    The loss is of the whole batch; "right" are the fraction of its pairs of pairs in order.
    """
    cosines_Q = _cosines(_by_example(vectors(model, batch), batch))[:, 0]
    is_less_QQ = batch.targets[:, None] < batch.targets
    differences = (cosines_Q[:, None] - cosines_Q)[is_less_QQ]
    loss = F.pad(_SCALE * differences, (1, 0)).logsumexp(0)
    right = (differences < 0).sum() / max(len(differences), 1)
    count = len(cosines_Q)
    return {TASK: LossSums(loss=loss * count, right=right * count, count=count)}


def _cosine_loss(
    model: AlbertForTasks, batch: ExampleBatch, vectors: LogitsFunction
) -> _VectorLoss:
    """Return the squared error of cosines (CosineSimilarityLoss); "right" are those within 0.1."""
    cosines_Q = _cosines(_by_example(vectors(model, batch), batch))[:, 0]
    errors_Q = (cosines_Q - batch.targets).abs()
    return {
        TASK: LossSums(
            loss=errors_Q.square().sum(), right=(errors_Q < 0.1).sum(), count=len(errors_Q)
        )
    }


_LOSS_OF: Final[dict[EmbeddingLoss, Any]] = {
    "MultipleNegativesRankingLoss": _ranking_loss,
    "TripletLoss": _triplet_loss,
    "CoSENTLoss": _cosent_loss,
    "CosineSimilarityLoss": _cosine_loss,
}
