"""Classifiers that are fitted on the encoder before a run trains it.

Finetuning then begins with a head that fits the encoder, and changes the encoder less (Kumar et al.
2022, "Fine-Tuning can Distort Pretrained Features and Underperform Out-of-Distribution").

A few texts of each label are too few for a classifier's loss, but they make many pairs (SetFit,
Tunstall et al. 2022, section 3): the encoder first learns to tell labels apart. The loss is that of
all pairs of a batch (Khosla et al. 2020, equation 2), of [CLS] states, which the classifier reads.

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

# Texts are drawn up to so many tokens: half a minute of two cores.
_MAX_TOKENS: Final = 300_000
# Added to the variance of each direction, as a part of the mean one: directions of a small variance
# are not scaled up to 1, since training, bf16 and int8 change them most. Of the states themselves
# more, since int8's noise in them is a tenth of their variance (docs/decisions.md).
_ADDED_VARIANCE: Final = 1.0
_ADDED_TO_STATES: Final = 5.0
# Of whitened states, so that the pooler's tanh is nearly linear in most of them.
_POOLED_SCALE: Final = 0.3
# Inverse strength of the L2 penalty, as scikit-learn's C.
_INVERSE_PENALTY: Final = 0.1
# Rounds of iterations of L-BFGS; the loss hardly falls after them, with 77 labels and with 5,000,
# where an iteration takes a second.
_ROUNDS: Final = 6
_ITERATIONS: Final = 5
# Steps that L-BFGS keeps, as SciPy's does; torch's own 100 take gigabytes with thousands of labels.
_HISTORY: Final = 10
# The mean number of texts of a label, up to which they are few.
_TEXTS_A_LABEL: Final = 16
_EPOCHS: Final = 20
_MIN_STEPS: Final = 50
_MAX_STEPS: Final = 400
_BATCH_SIZE: Final = 64
_BATCH_TOKENS: Final = 8192
_WARMUP: Final = 0.1
_CLIP_NORM: Final = 1.0
# Cosines are multiplied by it before a softmax, as in sentence-transformers.
_SCALE: Final = 20.0


class _Affine(NamedTuple):
    """The map x -> (x - mean) weight^T of rows (N, H)."""

    weight: Tensor
    mean: Tensor

    def __call__(self, rows_NH: Tensor) -> Tensor:
        return (rows_NH - self.mean) @ self.weight.T


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadFit:
    """The classifiers of a model that are fitted before it is trained.

    Attributes:
        data: of each, by its head.
        replaces_pooler: whether no other head reads the pooler, so that it can whiten the states.
        seed: of the texts that are drawn.
        contrast_rate: learning rate of the `contrast` before the fit, which the one classifier has;
            None without it.
    """

    model: AlbertForTasks
    data: Mapping[Task, Classification]
    replaces_pooler: bool
    seed: int
    contrast_rate: float | None

    def fit(self, world: World, products: PrecisionName) -> None:
        """Fit the heads on the [CLS] states of their training texts.

        Only the main process does; the others get its weights when the model is shared.
        """
        if not world.is_main:
            return
        model, began = self.model.to(world.device), time.monotonic()
        if self.contrast_rate is not None:
            (data,) = self.data.values()
            contrast(model, data, world, products, lr=self.contrast_rate, seed=self.seed)
        states = {
            task: _cls_states(model, task, _draw(of_task.examples, self.seed), world, products)
            for task, of_task in self.data.items()
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
            f"{', '.join(states)}: fitted on {num_texts:,} texts as the encoder has them, in "
            f"{time.monotonic() - began:.0f} s"
        )


def _cls_states(
    model: AlbertForTasks,
    task: Task,
    examples: Sequence[TokenisedExample],
    world: World,
    products: PrecisionName,
) -> tuple[Tensor, Tensor]:
    """Return the states (N, H) of texts, and their targets (N)."""
    batches = validation_batches(task, examples, row_length=1)
    states, targets = [], []
    with evaluating(model), precision(world.device, products):
        for batch in progress(batches, title="encoding texts", unit="batches"):
            moved = batch.to(world.device)
            states.append(model(moved.tokens, moved.firsts).float())
            targets.append(moved.targets)
    return torch.cat(states), torch.cat(targets)


def _draw(examples: Sequence[TokenisedExample], seed: int) -> list[TokenisedExample]:
    """Return examples in a random order up to a number of tokens."""
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(seed)).tolist()
    drawn: list[TokenisedExample] = []
    num_tokens = 0
    for index in order:
        num_tokens += len(examples[index].ids)
        if num_tokens > _MAX_TOKENS:
            break
        drawn.append(examples[index])
    return drawn


def _whitening(rows_NH: Tensor, added_variance: float = _ADDED_VARIANCE) -> _Affine:
    """Return the map that gives the rows' main directions a variance of 1."""
    mean_H = rows_NH.mean(0)
    variances_H, directions_HH = torch.linalg.eigh(torch.cov(rows_NH.T, correction=0).double())
    added = added_variance * variances_H.mean() + torch.finfo(torch.float32).tiny
    weight_HH = directions_HH.T / (variances_H.clamp(min=0) + added).sqrt()[:, None]
    return _Affine(weight_HH.float(), mean_H)


def _whiten(dense: nn.Linear, rows_NH: Tensor) -> None:
    """Have a pooler's linear map whiten the rows, at a scale where tanh is nearly linear."""
    weight_HH, mean_H = _whitening(rows_NH, _ADDED_TO_STATES)
    with torch.no_grad():
        dense.weight.copy_(_POOLED_SCALE * weight_HH)
        dense.bias.copy_(-(dense.weight @ mean_H))


def _fit(output: nn.Linear, pooled_NH: Tensor, targets_N: Tensor, data: Classification) -> None:
    """Fit a head's linear map by logistic regression, or ridge regression of a score."""
    whitening = _whitening(pooled_NH)
    white_NH = whitening(pooled_NH)
    weight_KH = torch.zeros_like(output.weight, requires_grad=True)
    bias_K = torch.zeros_like(output.bias, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weight_KH, bias_K],
        max_iter=_ITERATIONS,
        history_size=_HISTORY,
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
    """Whether labels have few texts on average, and one has several."""
    counts = np.bincount([example.target for example in data.examples])
    return len(data.examples) <= _TEXTS_A_LABEL * len(data.names) and bool(counts.max() > 1)


def contrast(
    model: AlbertForTasks,
    data: Classification,
    world: World,
    products: PrecisionName,
    *,
    lr: float,
    seed: int,
) -> None:
    """Train the encoder until texts of a label are nearer to each other than to other texts."""
    examples = data.examples
    targets = np.array([example.target for example in examples])
    mean_length = sum(len(example.ids) for example in examples) / len(examples)
    size = max(4, min(_BATCH_SIZE, int(_BATCH_TOKENS / mean_length)))
    num_steps = min(max(_EPOCHS * len(examples) // size, _MIN_STEPS), _MAX_STEPS)
    print(
        f"{len(examples):,} texts of {len(data.names)} labels are few: the encoder learns to tell "
        f"the labels apart in {num_steps} steps (--epochs trains the classifier instead)"
    )
    optimizer = torch.optim.AdamW(model.albert.parameters(), lr=lr)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1.0, (step + 1) / (_WARMUP * num_steps)) * (1 - step / num_steps),
    )
    batches = list(_draw_batches(targets, size, num_steps, np.random.default_rng(seed)))
    model.train()
    for indices in progress(batches, title="telling labels apart", unit="steps"):
        chosen = [examples[index] for index in indices]
        row_length = max(len(example.ids) for example in chosen)
        batch = collate_examples(data.name, chosen, row_length=row_length).to(world.device)
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
    """Yield the indices of batches that have at least two texts of each label where it has them."""
    labels = np.unique(targets)
    num_labels = min(len(labels), size // 2)
    for _ in range(num_steps):
        drawn = rng.choice(labels, num_labels, replace=False)
        groups = [rng.permutation(np.flatnonzero(targets == label)) for label in drawn]
        yield [int(index) for group in groups for index in group[: size // num_labels]]


def contrastive_loss(rows_CH: Tensor, targets_C: Tensor) -> Tensor:
    """Return the mean loss of the texts that share their label with another one."""
    vectors_CH = F.normalize(rows_CH, dim=-1)
    own_CC = torch.eye(len(targets_C), dtype=torch.bool, device=rows_CH.device)
    similarities_CC = (_SCALE * vectors_CH @ vectors_CH.T).masked_fill(own_CC, -torch.inf)
    logs_CC = similarities_CC.log_softmax(-1).masked_fill(own_CC, 0)
    equal_CC = (targets_C[:, None] == targets_C) & ~own_CC
    num_equal_C = equal_CC.sum(-1)
    losses_C = -(logs_CC * equal_CC).sum(-1) / num_equal_C.clamp(min=1)
    return losses_C.sum() / (num_equal_C > 0).sum().clamp(min=1)
