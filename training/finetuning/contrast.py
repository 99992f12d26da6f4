"""Contrast of few texts: the encoder learns to tell labels apart before a classifier is fitted.

A few texts of each label are too few for a classifier's loss, but they make many pairs (SetFit,
Tunstall et al. 2022, section 3). The loss is that of all pairs of a batch (Khosla et al. 2020,
equation 2), of [CLS] states, which the classifier reads.

Shape legend: C texts, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from albert_serve.progress import progress
from training.data.collate import collate_examples
from training.finetuning.classification import Classification
from training.loop.distributed import World
from training.model.heads import AlbertForTasks
from training.system.precision import PrecisionName, precision

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
    batches = list(_draw(targets, size, num_steps, np.random.default_rng(seed)))
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


def _draw(
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
