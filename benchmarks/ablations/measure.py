"""Measurement of an ablation's pretrained model on held-out text.

Each model is asked for the masked tokens of held-out text in its own form, and told apart pairs of
both sentence tasks: by its own head, as it was trained, and by a logistic regression on its frozen
features, which is there for a model without a head too.

Shape legend: B rows, S positions, H hidden size, R masked tokens, C sequences, P pairs,
F features (2 H).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from training.data.batch import PretrainBatch
from training.data.examples import IGNORED, ExampleSettings, SentenceTask
from training.data.masking import NgramMasking
from training.data.shards import Shards
from training.evaluation.validation import evaluating, held_out
from training.model.heads import AlbertForTasks
from training.system.precision import precision

PAIR_TASKS: Final[tuple[SentenceTask, ...]] = ("nsp", "sop")
# Weight of the probe's squared weights in its loss; features have unit variance.
_PENALTY: Final = 1e-2
_PROBE_ITERATIONS: Final = 200
# Lengths of segments from so many tens of tokens on are taken as one.
_MOST_TENS: Final = 52


class ModelReading(NamedTuple):
    """A model's predictions and features on some text.

    Attributes:
        losses: (R,) of each masked token, in nats.
        is_right: (R,) bool, whether it is the model's first guess.
        labels: (P,) of each pair.
        guesses: (P,) its label by the model's own head; IGNORED where it has none.
        features: (P, F) the last layer's [CLS] row and the mean of its rows.
        lengths: (P, 2) tokens of the pair's first and second segment, special ones counted.
    """

    losses: Tensor
    is_right: Tensor
    labels: Tensor
    guesses: Tensor
    features: Tensor
    lengths: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class AblationTexts:
    """Text to train probes on and text to measure on, cut as each task has it.

    Attributes:
        num_tokens: so many of each, or all that there are.
    """

    training: Shards
    held_out: Shards
    masking: NgramMasking
    length: int
    num_tokens: int

    def batches(self, task: SentenceTask, shards: Shards) -> Iterator[PretrainBatch]:
        """The same batches each time."""
        settings = ExampleSettings(length=self.length, sentence_task=task)
        num_left = self.num_tokens
        for batch in held_out(shards, self.masking, settings):
            yield batch
            num_left -= batch.num_tokens
            if num_left <= 0:
                return

    @property
    def probe_shards(self) -> Shards:
        """Enough of the training text; an epoch of all of it takes long to cut."""
        return replace(self.training, parts=self.training.parts[:1])


def measure_variant(
    model: AlbertForTasks, task: SentenceTask, texts: AblationTexts, device: torch.device
) -> dict[str, float]:
    """Measure a model that was trained with this task.

    Models that are asked about text of the same form are asked the same.

    Returns:
        `masked_loss` and `masked_accuracy` over text in the form of the model's own task; of both
        sentence tasks `{task}_head_accuracy`, where the model has a head, `{task}_probe_accuracy`,
        and `{task}_lengths_accuracy`, of a probe that is told the segments' lengths alone; the
        standard error of each, whose name ends in `_se`; `{task}_majority`, the share of the more
        frequent label; counts of what was asked, and `parameters` of the backbone.
    """
    readings = {
        form: read(model, texts.batches(form, texts.held_out), device)
        for form in dict.fromkeys((*PAIR_TASKS, task))
    }
    own = readings[task]
    predictions = {"masked_loss": own.losses, "masked_accuracy": own.is_right}
    figures: dict[str, float] = {
        "parameters": sum(p.numel() for p in model.albert.parameters()),
        "masked_tokens": len(own.losses),
    }
    for form in PAIR_TASKS:
        labels_P = readings[form].labels
        trained_on = read(model, texts.batches(form, texts.probe_shards), device)
        for by, guesses_P in _guesses(trained_on, readings[form]).items():
            predictions[f"{form}_{by}_accuracy"] = guesses_P == labels_P
        ones = labels_P.double().mean().item()
        figures[f"{form}_majority"] = max(ones, 1 - ones)
        figures[f"{form}_pairs"] = len(labels_P)
    for name, values in predictions.items():
        figures[name] = values.double().mean().item()
        figures[f"{name}_se"] = values.double().std(correction=0).item() / math.sqrt(len(values))
    return figures


def read(
    model: AlbertForTasks, batches: Iterable[PretrainBatch], device: torch.device
) -> ModelReading:
    """Put batches through the model, without dropout and gradients."""
    bar = tqdm(batches, desc="measuring", leave=False, delay=3, disable=None)
    with evaluating(model), precision(device):
        parts = [_read_batch(model, batch.to(device)) for batch in bar]
    return ModelReading(*(torch.cat(tensors).cpu() for tensors in zip(*parts, strict=True)))


def _read_batch(model: AlbertForTasks, batch: PretrainBatch) -> ModelReading:
    hidden_BSH = model(batch.tokens)
    hidden_TH = hidden_BSH.flatten(0, 1)
    targets_R = batch.targets[: batch.num_masked]
    logits_RV = model.logits("fill-mask", hidden_TH[batch.rows[: batch.num_masked]]).float()
    assert batch.tokens.packing is not None
    sequences_BS = batch.tokens.packing.sequences
    means_CH = sequence_means(hidden_BSH, sequences_BS)
    firsts_CH = hidden_TH[batch.firsts[: len(means_CH)]]
    labels_C = batch.labels[: len(means_CH)]
    guesses_C = torch.full_like(labels_C, IGNORED)
    if "sentence-order" in model.tasks:
        guesses_C = model.logits("sentence-order", firsts_CH).argmax(-1)
    is_pair_C = labels_C != IGNORED
    return ModelReading(
        losses=F.cross_entropy(logits_RV, targets_R, reduction="none"),
        is_right=logits_RV.argmax(-1) == targets_R,
        labels=labels_C[is_pair_C],
        guesses=guesses_C[is_pair_C],
        features=torch.cat([firsts_CH.float(), means_CH], dim=1)[is_pair_C],
        lengths=segment_lengths(batch.tokens.types, sequences_BS)[is_pair_C],
    )


def sequence_means(hidden_BSH: Tensor, sequences_BS: Tensor) -> Tensor:
    """The mean row (C, H) of each sequence in packed rows (B, S, H), in order.

    Args:
        sequences_BS: each token's sequence within its row; -1 where padded.
    """
    sequences_R = _numbered(sequences_BS)
    rows_RH = hidden_BSH[sequences_BS >= 0].float()
    sizes_C = torch.bincount(sequences_R)
    sums_CH = rows_RH.new_zeros(len(sizes_C), rows_RH.shape[1])
    means_CH: Tensor = sums_CH.index_add_(0, sequences_R, rows_RH) / sizes_C[:, None]
    return means_CH


def segment_lengths(types_BS: Tensor, sequences_BS: Tensor) -> Tensor:
    """Tokens (C, 2) of the first and the second segment of each sequence."""
    segments_R = 2 * _numbered(sequences_BS) + types_BS[sequences_BS >= 0]
    num_segments = 2 * (int(segments_R.max()) // 2 + 1)
    return torch.bincount(segments_R, minlength=num_segments).reshape(-1, 2)


def _numbered(sequences_BS: Tensor) -> Tensor:
    """The sequence of each real token (R,), counted through all rows."""
    counts_B = sequences_BS.amax(1) + 1
    before_B = counts_B.cumsum(0) - counts_B
    return (before_B[:, None] + sequences_BS)[sequences_BS >= 0]


def _guesses(training: ModelReading, held_out: ModelReading) -> dict[str, Tensor]:
    """Return the labels (P,) of the held-out pairs by each classifier."""
    guesses = {
        "probe": probe(training.features, training.labels, held_out.features),
        "lengths": probe(
            length_features(training.lengths), training.labels, length_features(held_out.lengths)
        ),
    }
    if (held_out.guesses != IGNORED).all():
        guesses["head"] = held_out.guesses
    return guesses


def length_features(lengths_P2: Tensor) -> Tensor:
    """Return the longer segment and both lengths, in tens of tokens, as features (P, F)."""
    tens_P2 = (lengths_P2 // 10).clamp_max(_MOST_TENS - 1)
    of_each_PF = F.one_hot(tens_P2, _MOST_TENS).flatten(1)
    return torch.cat([of_each_PF, lengths_P2.diff().sign()], dim=1).float()


def probe(features_PF: Tensor, labels_P: Tensor, asked_QF: Tensor) -> Tensor:
    """Labels (Q,) of other pairs by a logistic regression on these, of 0 and 1."""
    mean_F, std_F = features_PF.double().mean(0), features_PF.double().std(0).clamp_min(1e-6)
    inputs_PF = (features_PF.double() - mean_F) / std_F
    weights_F = torch.zeros_like(mean_F, requires_grad=True)
    bias = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weights_F, bias], max_iter=_PROBE_ITERATIONS, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        logits_P = inputs_PF @ weights_F + bias
        fit = F.binary_cross_entropy_with_logits(logits_P, labels_P.double())
        total: Tensor = fit + _PENALTY / 2 * weights_F.square().sum()
        total.backward()  # type: ignore[no-untyped-call]
        return total

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        return ((asked_QF.double() - mean_F) / std_F @ weights_F + bias > 0).long()
