"""Loss functions: loss and accuracy of a model on a micro-batch of each task.

Shape legend: B rows, S positions, H hidden size, L layers, R rows gathered, C sequences, K outputs,
Q questions of multiple choice, whose choices are sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from albert_serve.bundle.weights import TOKENS
from training.data.batch import ExampleBatch, LossName, MicroBatch, PretrainBatch
from training.data.choices import ChoiceBatch
from training.data.examples import IGNORED
from training.model.albert import ModelInputs
from training.model.heads import AlbertForTasks


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSums:
    """Summed loss and number of right answers over `count` predictions.

    Attributes:
        logits, targets: (C, K), and (C,) or (C, K), of text classification, for its metrics.
    """

    loss: Tensor
    right: Tensor
    count: int
    logits: Tensor | None = None
    targets: Tensor | None = None


class Tally:
    """Loss and accuracy over several batches; sums stay on the device until they are read.

    Logits and targets of text classification are kept for its metrics.
    """

    def __init__(self) -> None:
        self.count = 0
        self._sums: Tensor | None = None
        self._logits: list[Tensor] = []
        self._targets: list[Tensor] = []

    def add(self, losses: LossSums) -> None:
        """Add the losses of one batch."""
        self.count += losses.count
        sums = torch.stack([losses.loss.detach().double(), losses.right.double()])
        self._sums = sums if self._sums is None else self._sums + sums
        if losses.logits is not None and losses.targets is not None:
            self._logits.append(losses.logits.detach())
            self._targets.append(losses.targets)

    def merge(self, other: Tally) -> None:
        """Add another tally."""
        self.count += other.count
        if other._sums is not None:
            self._sums = other._sums if self._sums is None else self._sums + other._sums
        self._logits += other._logits
        self._targets += other._targets

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to send to another process, which has another device."""
        return {
            **vars(self),
            "_sums": None if self._sums is None else self._sums.cpu(),
            "_logits": [logits.cpu() for logits in self._logits],
            "_targets": [targets.cpu() for targets in self._targets],
        }

    @property
    def sums(self) -> tuple[float, float, float]:
        """Summed loss, right answers and predictions."""
        loss, right = (0.0, 0.0) if self._sums is None else self._sums.tolist()
        return loss, right, float(self.count)

    @property
    def loss(self) -> float:
        """Mean loss per prediction; nan without predictions."""
        return self.sums[0] / self.count if self.count else math.nan

    @property
    def accuracy(self) -> float:
        """The fraction of the predictions that is right; nan without predictions."""
        return self.sums[1] / self.count if self.count else math.nan

    @property
    def predictions(self) -> tuple[Tensor, Tensor]:
        """Logits (N, K) and targets, (N,) or (N, K), of text classification."""
        return torch.cat(self._logits).float().cpu(), torch.cat(self._targets).cpu()


def cross_entropy(logits_RK: Tensor, targets_R: Tensor, count: int | None = None) -> LossSums:
    """Return cross-entropy and accuracy of logits (R, K); targets of IGNORED are ignored.

    Args:
        count: the number of other targets, where it is known.
    """
    return LossSums(
        loss=F.cross_entropy(logits_RK.float(), targets_R, ignore_index=IGNORED, reduction="sum"),
        right=(logits_RK.argmax(-1) == targets_R).sum(),
        count=int((targets_R != IGNORED).sum()) if count is None else count,
    )


class PretrainTargets(NamedTuple):
    """The positions of a batch that the heads of pretraining read, and their targets.

    Attributes:
        rows, targets: (R,) of masked tokens.
        firsts, labels: (C,) of the sentence task; None if its head is left out.
    """

    rows: Tensor
    targets: Tensor
    firsts: Tensor | None
    labels: Tensor | None

    @classmethod
    def of(cls, model: AlbertForTasks, batch: PretrainBatch) -> PretrainTargets:
        """Return the positions that the model's heads read, and their targets.

        The head of the sentence task is left out where the batch's rows have none: gradients of
        zero would still decay its weights.
        """
        if "sentence-order" in model.tasks and "sentence-order" in batch.counts:
            return cls(batch.rows, batch.targets, batch.firsts, batch.labels)
        return cls(batch.rows, batch.targets, None, None)

    @property
    def positions(self) -> Tensor:
        """The gathered positions: masked tokens, then each [CLS]."""
        return self.rows if self.firsts is None else torch.cat([self.rows, self.firsts])


# Summed loss and right answers of each head of pretraining that was read.
HeadSums: TypeAlias = dict[LossName, tuple[Tensor, Tensor]]


def _pretrain_sums(
    model: AlbertForTasks, tokens: ModelInputs, reading: PretrainTargets
) -> HeadSums:
    """Return the sums for `pretrain_loss`; takes only tensors, so that it can be compiled."""
    return head_sums(model, model(tokens, reading.positions), reading)


def head_sums(model: AlbertForTasks, hidden_RH: Tensor, reading: PretrainTargets) -> HeadSums:
    """Return the sums of the heads over the hidden states at the positions that they read."""
    num_masked = len(reading.targets)
    masked = cross_entropy(model.logits("fill-mask", hidden_RH[:num_masked]), reading.targets, 0)
    sums: HeadSums = {"fill-mask": (masked.loss, masked.right)}
    if reading.labels is not None:
        order = cross_entropy(
            model.logits("sentence-order", hidden_RH[num_masked:]), reading.labels, 0
        )
        sums["sentence-order"] = (order.loss, order.right)
    return sums


def pretrain_loss(
    model: AlbertForTasks,
    batch: PretrainBatch,
    sums: Callable[..., HeadSums] = _pretrain_sums,
) -> dict[LossName, LossSums]:
    """Return the losses of masked tokens and, with its head and labels, of the sentence task.

    Paper, sections 3.1 and 4.1. Logits, and the last layer after its attention, are computed at
    the gathered positions only.
    """
    reading = PretrainTargets.of(model, batch)
    if sums is not _pretrain_sums:
        mark_dynamic(reading)
    return losses_of(batch, sums(model, batch.tokens, reading))


def mark_dynamic(inputs: Iterable[Tensor | None], dimension: int = 0) -> None:
    """Have code compiled for any size of a dimension, from the first batch on.

    Torch would compile it for the first batch's numbers, and for any at the second. Sums over rows
    are then rounded otherwise, and which batch is the first depends on where a run was resumed.
    """
    for tensor in inputs:
        if tensor is not None:
            torch._dynamo.maybe_mark_dynamic(tensor, dimension)


def losses_of(batch: PretrainBatch, sums: HeadSums) -> dict[LossName, LossSums]:
    """Return the losses of a batch from its sums."""
    return {
        name: LossSums(loss=loss, right=right, count=batch.counts[name])
        for name, (loss, right) in sums.items()
    }


def cls_logits(model: AlbertForTasks, batch: ExampleBatch) -> Tensor:
    """Return the logits (C, K) of the batch's classifier, from each example's [CLS] row."""
    return model.logits(batch.task, model(batch.tokens, batch.firsts))


def _span_logits(model: AlbertForTasks, batch: ExampleBatch) -> Tensor:
    """Return start and end logits (C, S, 2) of the tokens of each example; -inf behind its last."""
    logits_T2 = model.logits("question-answering", model(batch.tokens)).flatten(0, 1).float()
    rows_CS, places_S = example_rows(batch)
    is_outside_CS = places_S >= batch.sizes[:, None]
    return logits_T2[rows_CS].masked_fill(is_outside_CS[..., None], -torch.inf)


def example_rows(batch: ExampleBatch) -> tuple[Tensor, Tensor]:
    """Return the rows (C, S) of each example's positions in the flattened tokens, and the (S)."""
    ids = batch.tokens.ids
    places_S = torch.arange(ids.shape[1], device=ids.device)
    return (batch.firsts[:, None] + places_S).clamp(max=ids.numel() - 1), places_S


# A model's pass over a batch, which is an argument of its loss function to be compiled by itself.
LogitsFunction: TypeAlias = Callable[[AlbertForTasks, ExampleBatch], Tensor]


def classification_loss(
    model: AlbertForTasks,
    batch: ExampleBatch,
    logits: LogitsFunction = cls_logits,
    class_weights: Tensor | None = None,
) -> dict[LossName, LossSums]:
    """Return the loss of text classification: cross-entropy over the pooled [CLS] row.

    Args:
        class_weights: (K,) factors of the losses of each label's examples, in training only: the
            loss of held-out texts is the plain one.
    """
    logits_CK = logits(model, batch).float()
    result = cross_entropy(logits_CK, batch.targets, len(batch.targets))
    if class_weights is not None and model.training:
        loss = F.cross_entropy(
            logits_CK, batch.targets, class_weights.to(logits_CK.device), reduction="sum"
        )
        result = replace(result, loss=loss)
    return {batch.task: replace(result, logits=logits_CK, targets=batch.targets)}


def regression_loss(
    model: AlbertForTasks, batch: ExampleBatch, logits: LogitsFunction = cls_logits
) -> dict[LossName, LossSums]:
    """Return the loss of a regression: squared errors; right are numbers within 0.5."""
    logits_C1 = logits(model, batch).float()
    errors_C = logits_C1[:, 0] - batch.targets
    result = LossSums(
        loss=errors_C.square().sum(),
        right=(errors_C.abs() < 0.5).sum(),
        count=len(errors_C),
        logits=logits_C1,
        targets=batch.targets,
    )
    return {batch.task: result}


def multi_label_loss(
    model: AlbertForTasks, batch: ExampleBatch, logits: LogitsFunction = cls_logits
) -> dict[LossName, LossSums]:
    """Return the loss of texts with several labels: binary cross-entropy, the mean over labels.

    Right are texts of which exactly the labels are predicted. The targets are 1 and 0, (C, K).
    """
    logits_CK = logits(model, batch).float()
    losses_CK = F.binary_cross_entropy_with_logits(logits_CK, batch.targets, reduction="none")
    result = LossSums(
        loss=losses_CK.mean(-1).sum(),
        right=((logits_CK > 0) == (batch.targets > 0)).all(-1).sum(),
        count=len(logits_CK),
        logits=logits_CK,
        targets=batch.targets,
    )
    return {batch.task: result}


def span_loss(
    model: AlbertForTasks, batch: ExampleBatch, logits: LogitsFunction = _span_logits
) -> dict[LossName, LossSums]:
    """Return the loss of question answering: cross-entropy of start and end positions."""
    logits_CS2, count = logits(model, batch), len(batch.targets)
    start, end = (
        cross_entropy(logits_CS2[..., side], batch.targets[:, side], count) for side in (0, 1)
    )
    # Start and end are halves of one prediction (the original's run_squad).
    loss, right = (start.loss + end.loss) / 2, (start.right + end.right) / 2
    return {"question-answering": LossSums(loss=loss, right=right, count=count)}


def _token_logits(model: AlbertForTasks, batch: ExampleBatch) -> Tensor:
    """Return the logits (C * T, K) of the tokens that have a place in the targets (C, T)."""
    rows_CS, _ = example_rows(batch)
    rows_CT = rows_CS[:, : batch.targets.shape[1]]
    return model.logits(TOKENS, model(batch.tokens, rows_CT.flatten()))


def token_loss(
    model: AlbertForTasks, batch: ExampleBatch, logits: LogitsFunction = _token_logits
) -> dict[LossName, LossSums]:
    """Return the loss of token classification: cross-entropy over words' first tokens."""
    targets_R, count = batch.targets.flatten(), batch.counts[TOKENS]
    return {TOKENS: cross_entropy(logits(model, batch), targets_R, count)}


def choice_loss(
    model: AlbertForTasks, batch: ChoiceBatch, logits: LogitsFunction = cls_logits
) -> dict[LossName, LossSums]:
    """Return the loss of multiple choice: cross-entropy over the choices of each question.

    Each choice has a logit, from its [CLS] row.
    """
    logits_C = logits(model, batch)[:, 0].float()
    places_K = torch.arange(int(batch.num_choices.max()), device=logits_C.device)
    is_choice_QK = places_K < batch.num_choices[:, None]
    missing_QK = torch.full(is_choice_QK.shape, -torch.inf, device=logits_C.device)
    logits_QK = missing_QK.masked_scatter(is_choice_QK, logits_C)
    return {"multiple-choice": cross_entropy(logits_QK, batch.targets, len(batch.targets))}


LossFunction: TypeAlias = Callable[[AlbertForTasks, Any], Mapping[LossName, LossSums]]
# The loss function of each micro-batch's task.
LOSS_OF: Final[Mapping[str, LossFunction]] = MappingProxyType(
    {
        "pretraining": pretrain_loss,
        "text-classification": classification_loss,
        "question-answering": span_loss,
        "multiple-choice": choice_loss,
        "token-classification": token_loss,
    }
)


def compiled_losses() -> dict[str, LossFunction]:
    """Return the loss functions with the model's passes compiled.

    Sizes that differ from step to step are dynamic.
    """
    return {
        "pretraining": partial(pretrain_loss, sums=torch.compile(_pretrain_sums)),
        "text-classification": partial(classification_loss, logits=compile_logits(cls_logits)),
        "question-answering": partial(span_loss, logits=compile_logits(_span_logits)),
        "multiple-choice": partial(choice_loss, logits=compile_logits(cls_logits)),
        "token-classification": partial(token_loss, logits=compile_logits(_token_logits)),
    }


def compile_logits(logits: LogitsFunction) -> LogitsFunction:
    """Compile a model's pass over packed examples, for any numbers of rows and of examples.

    On a CPU also for any length of the rows.
    """
    compiled = torch.compile(logits)

    def run(model: AlbertForTasks, batch: ExampleBatch) -> Tensor:
        packing = batch.tokens.packing
        assert packing is not None
        tokens = batch.tokens
        rows = (tokens.ids, tokens.types, packing.positions, packing.sequences)
        mark_dynamic((*rows, packing.bounds, batch.firsts, batch.sizes, batch.targets))
        if batch.firsts.device.type == "cpu":
            mark_dynamic(rows, dimension=1)
        # Sizes that are equal in the first batch are not in others.
        with torch.fx.experimental._config.patch(use_duck_shape=False):  # type: ignore[attr-defined]
            return compiled(model, batch)

    return run


class Objective(nn.Module):
    """A model and its loss functions as one module, which DDP wraps."""

    def __init__(
        self,
        model: AlbertForTasks,
        device: torch.device,
        loss_of: Mapping[str, LossFunction] = LOSS_OF,
    ) -> None:
        super().__init__()
        self.model = model
        self.device = device
        self.loss_of = loss_of

    def forward(self, batch: MicroBatch) -> Mapping[LossName, LossSums]:
        """Return the losses of one micro-batch."""
        return self.loss_of[batch.task](self.model, batch.to(self.device))
