"""Classifiers that are fitted on the frozen encoder before a run trains all weights.

Finetuning then changes the encoder less (Kumar et al. 2022, "Fine-Tuning can Distort Pretrained
Features and Underperform Out-of-Distribution").

A classifier's loss needs more than a few texts per label. But a few texts make many pairs (SetFit,
Tunstall et al. 2022, section 3), from which the encoder first learns to separate labels. This loss
compares the [CLS] states of all pairs of a batch (Khosla et al. 2020, equation 2).

Shape legend: N, C texts, H hidden size, K labels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from albert_serve.bundle.manifest import ProblemType
from albert_serve.progress import progress
from training.data.batch import TokenisedExample
from training.data.collate import collate_examples
from training.loop.distributed import World
from training.loop.validation import evaluating
from training.model.heads import AlbertForTasks, PooledHead, Task
from training.system.precision import PrecisionName, precision
from training.tasks.base import validation_batches
from training.tasks.classification.loss import Classification

# Maximum number of tokens to encode, which takes two cores half a minute.
_MAX_TOKENS: Final = 300_000
# Whitening adds this multiple of the mean variance to the variance of each direction, so that it
# does not scale directions of small variance up to 1: training, bf16 and int8 change those most.
_ADDED_VARIANCE: Final = 1.0
# int8 adds noise of a tenth of the variance to the [CLS] states, so they need a larger multiple
# (docs/decisions.md).
_ADDED_STATE_VARIANCE: Final = 5.0
# At this scale, the pooler's tanh is nearly linear for most whitened states.
_POOLED_SCALE: Final = 0.3
# Inverse strength of the L2 penalty, like scikit-learn's C.
_INVERSE_PENALTY: Final = 0.1
# More iterations of L-BFGS hardly lower the loss, with 77 labels or with 5,000. With 5,000 labels,
# an iteration takes a second.
_ROUNDS: Final = 6
_ITERATIONS: Final = 5
# This is SciPy's default. torch's default of 100 takes gigabytes with thousands of labels.
_HISTORY_SIZE: Final = 10
# With more texts per label on average, training needs no contrastive steps.
_MAX_FEW_TEXTS: Final = 16
_EPOCHS: Final = 20
_MIN_STEPS: Final = 50
_MAX_STEPS: Final = 400
_BATCH_SIZE: Final = 64
_BATCH_TOKENS: Final = 8192
_WARMUP_FRACTION: Final = 0.1
_CLIP_NORM: Final = 1.0
# Cosines are multiplied by this before the softmax, as in sentence-transformers.
_SCALE: Final = 20.0


class _Affine(NamedTuple):
    """The map x -> (x - mean) weight^T of rows (N, H)."""

    weight: Tensor
    mean: Tensor

    def __call__(self, rows_NH: Tensor) -> Tensor:
        return (rows_NH - self.mean) @ self.weight.T


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadFit:
    """The fit of a model's classifiers before training.

    Attributes:
        data: data of each classifier, by its head.
        replaces_pooler: whether the pooler becomes a whitening, which no other head may read.
        seed: seed of the random choice of texts.
        contrast_rate: learning rate of contrastive training before the fit, for a single
            classifier, or None to omit this training.
    """

    model: AlbertForTasks
    data: Mapping[Task, Classification]
    replaces_pooler: bool
    seed: int
    contrast_rate: float | None

    def fit(self, world: World, products: PrecisionName) -> None:
        """Fit the heads on the [CLS] states of their training texts.

        Only the main process fits the heads. The others receive them with the model's weights.
        """
        if not world.is_main:
            return
        model, began = self.model.to(world.device), time.monotonic()
        if self.contrast_rate is not None:
            (data,) = self.data.values()
            contrast(model, data, world, products, lr=self.contrast_rate, seed=self.seed)
        states = {
            task: _cls_states(model, task, _sample(data.examples, self.seed), world, products)
            for task, data in self.data.items()
        }
        assert model.pooler is not None
        if self.replaces_pooler:
            _whiten(model.pooler.dense, torch.cat([rows_NH for rows_NH, _ in states.values()]))
        for task, (rows_NH, targets_N) in states.items():
            head = model.heads[task]
            assert isinstance(head, PooledHead)
            with torch.no_grad():
                pooled_NH = head.pooler(rows_NH)
            _fit(head.output, pooled_NH, targets_N, self.data[task])
        num_texts = sum(len(rows_NH) for rows_NH, _ in states.values())
        print(
            f"{', '.join(states)}: fitted on {num_texts:,} texts in "
            f"{time.monotonic() - began:.0f} s, with the encoder frozen."
        )


def _cls_states(
    model: AlbertForTasks,
    task: Task,
    examples: Sequence[TokenisedExample],
    world: World,
    products: PrecisionName,
) -> tuple[Tensor, Tensor]:
    """Return the [CLS] states (N, H) of texts, and the targets (N,) or (N, K)."""
    batches = validation_batches(task, examples, row_length=1)
    states, targets = [], []
    with evaluating(model), precision(world.device, products):
        for batch in progress(batches, title="encoding texts", unit="batches"):
            device_batch = batch.to(world.device)
            states.append(model(device_batch.tokens, device_batch.firsts).float())
            targets.append(device_batch.targets)
    return torch.cat(states), torch.cat(targets)


def _sample(examples: Sequence[TokenisedExample], seed: int) -> list[TokenisedExample]:
    """Return random examples of at most `_MAX_TOKENS` tokens in total."""
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(seed)).tolist()
    sample: list[TokenisedExample] = []
    num_tokens = 0
    for index in order:
        num_tokens += len(examples[index].ids)
        if num_tokens > _MAX_TOKENS:
            break
        sample.append(examples[index])
    return sample


def _whitening(rows_NH: Tensor, added_variance: float = _ADDED_VARIANCE) -> _Affine:
    """Return the map that scales the rows' main directions to a variance of 1."""
    mean_H = rows_NH.mean(0)
    variances_H, directions_HH = torch.linalg.eigh(torch.cov(rows_NH.T, correction=0).double())
    added = added_variance * variances_H.mean() + torch.finfo(torch.float32).tiny
    weight_HH = directions_HH.T / (variances_H.clamp(min=0) + added).sqrt()[:, None]
    return _Affine(weight_HH.float(), mean_H)


def _whiten(dense: nn.Linear, rows_NH: Tensor) -> None:
    """Set a pooler's linear map to whiten the rows, at a scale at which tanh is nearly linear."""
    weight_HH, mean_H = _whitening(rows_NH, _ADDED_STATE_VARIANCE)
    with torch.no_grad():
        dense.weight.copy_(_POOLED_SCALE * weight_HH)
        dense.bias.copy_(-(dense.weight @ mean_H))


def _fit(output: nn.Linear, pooled_NH: Tensor, targets_N: Tensor, data: Classification) -> None:
    """Fit a head's linear map by logistic regression, or by ridge regression for scores."""
    whitening = _whitening(pooled_NH)
    white_NH = whitening(pooled_NH)
    weight_KH = torch.zeros_like(output.weight, requires_grad=True)
    bias_K = torch.zeros_like(output.bias, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weight_KH, bias_K],
        max_iter=_ITERATIONS,
        history_size=_HISTORY_SIZE,
        line_search_fn="strong_wolfe",
    )
    loss_of = _LOSSES[data.problem]
    penalty = 1 / (2 * _INVERSE_PENALTY * len(white_NH))

    def loss() -> Tensor:
        optimizer.zero_grad()
        logits_NK = F.linear(white_NH, weight_KH, bias_K)
        value = loss_of(logits_NK, targets_N, data.class_weights)
        value = value + penalty * weight_KH.square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    for _ in progress(range(_ROUNDS), title="fitting the classifier", unit="rounds"):
        optimizer.step(loss)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        output.weight.copy_(weight_KH @ whitening.weight)
        output.bias.copy_(bias_K - output.weight @ whitening.mean)


def _cross_entropy(logits_NK: Tensor, targets_N: Tensor, weights_K: Tensor | None) -> Tensor:
    weights_K = None if weights_K is None else weights_K.to(logits_NK.device)
    return F.cross_entropy(logits_NK, targets_N, weights_K, reduction="sum") / len(targets_N)


_LOSSES: Final[Mapping[ProblemType, Callable[[Tensor, Tensor, Tensor | None], Tensor]]] = {
    "single_label_classification": _cross_entropy,
    "multi_label_classification": lambda logits_NK, targets_NK, _: (
        F.binary_cross_entropy_with_logits(logits_NK, targets_NK.float()) * logits_NK.shape[1]
    ),
    "regression": lambda logits_N1, targets_N, _: F.mse_loss(logits_N1[:, 0], targets_N.float()),
}


def has_few_texts(data: Classification) -> bool:
    """Return whether labels have few texts on average, and at least one label has several."""
    counts = np.bincount([example.target for example in data.examples])
    return len(data.examples) <= _MAX_FEW_TEXTS * len(data.names) and bool(counts.max() > 1)


def contrast(
    model: AlbertForTasks,
    data: Classification,
    world: World,
    products: PrecisionName,
    *,
    lr: float,
    seed: int,
) -> None:
    """Train the encoder to move texts with equal labels nearer to each other than to others."""
    examples = data.examples
    targets = np.array([example.target for example in examples])
    mean_length = sum(len(example.ids) for example in examples) / len(examples)
    size = max(4, min(_BATCH_SIZE, int(_BATCH_TOKENS / mean_length)))
    num_steps = min(max(_EPOCHS * len(examples) // size, _MIN_STEPS), _MAX_STEPS)
    print(
        f"{len(examples):,} texts of {len(data.names)} labels are few. The encoder first learns to "
        f"separate the labels in {num_steps} steps. To train the classifier instead, use --epochs."
    )
    optimizer = torch.optim.AdamW(model.albert.parameters(), lr=lr)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1.0, (step + 1) / (_WARMUP_FRACTION * num_steps)) * (1 - step / num_steps),
    )
    batches = list(_draw_batches(targets, size, num_steps, np.random.default_rng(seed)))
    model.train()
    for indices in progress(batches, title="separating labels", unit="steps"):
        batch_examples = [examples[index] for index in indices]
        row_length = max(len(example.ids) for example in batch_examples)
        batch = collate_examples(data.name, batch_examples, row_length=row_length)
        batch = batch.to(world.device)
        with precision(world.device, products):
            rows_CH = model(batch.tokens, batch.firsts)
        optimizer.zero_grad()
        contrastive_loss(rows_CH.float(), batch.targets).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.albert.parameters(), _CLIP_NORM)
        optimizer.step()
        rate.step()


def _draw_batches(
    targets: NDArray[np.int64], size: int, num_steps: int, rng: np.random.Generator
) -> Iterator[Sequence[int]]:
    """Yield the indices of each batch's texts, at least two for each label that has two."""
    labels = np.unique(targets)
    num_labels = min(len(labels), size // 2)
    for _ in range(num_steps):
        batch_labels = rng.choice(labels, num_labels, replace=False)
        groups = [rng.permutation(np.flatnonzero(targets == label)) for label in batch_labels]
        yield [int(index) for group in groups for index in group[: size // num_labels]]


def contrastive_loss(rows_CH: Tensor, targets_C: Tensor) -> Tensor:
    """Return the mean loss of the texts that share their label with another text of the batch."""
    vectors_CH = F.normalize(rows_CH, dim=-1)
    is_self_CC = torch.eye(len(targets_C), dtype=torch.bool, device=rows_CH.device)
    similarities_CC = (_SCALE * vectors_CH @ vectors_CH.T).masked_fill(is_self_CC, -torch.inf)
    logs_CC = similarities_CC.log_softmax(-1).masked_fill(is_self_CC, 0)
    equal_CC = (targets_C[:, None] == targets_C) & ~is_self_CC
    num_equal_C = equal_CC.sum(-1)
    losses_C = -(logs_CC * equal_CC).sum(-1) / num_equal_C.clamp(min=1)
    return losses_C.sum() / (num_equal_C > 0).sum().clamp(min=1)
