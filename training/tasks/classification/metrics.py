"""Evaluation of text classification and regression, and calibration of a classifier.

Shape legend: N texts, K labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import exp, nan
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from albert_serve.bundle.manifest import ProblemType
from albert_serve.bundle.weights import CLASSIFICATION
from albert_serve.tasks.base import EncoderInput, Runner
from albert_serve.tokenizer import AlbertTokenizer
from training.data.batch import TokenisedExample
from training.glue.tasks import Metric
from training.model.heads import Task
from training.tasks.base import check_metric
from training.tasks.classification.files import LabelledText, labelled_examples
from training.tasks.engine import EngineItem, predict
from training.tasks.metrics import COMBINED, compute_metrics, mean_metric, predictions_of

_NUM_BINS: Final = 15
_MAX_LOG_TEMPERATURE: Final = 4.0
# Prefix of the metrics' names.
PREFIX: Final = "text_classification"
# Allowed values of `--metric`.
_ALLOWED: Final[Mapping[ProblemType, tuple[Metric, ...]]] = MappingProxyType(
    {
        "single_label_classification": ("accuracy", "macro_f1", "matthews_correlation"),
        "multi_label_classification": ("micro_f1", "macro_f1", "subset_accuracy"),
        "regression": ("pearson", "spearman", "mse"),
    }
)
_METRICS: Final[Mapping[ProblemType, tuple[Metric, ...]]] = MappingProxyType(
    {
        "single_label_classification": ("accuracy", "macro_f1"),
        "multi_label_classification": ("micro_f1", "macro_f1", "subset_accuracy"),
        "regression": ("pearson", "spearman", "mse"),
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationMetrics:
    """The metrics of a classifier's held-out texts during training.

    Attributes:
        official: metrics whose mean selects the best checkpoint by default.
        metric: value of `--metric`, which selects the best checkpoint instead, or None.
    """

    problem: ProblemType
    num_labels: int
    official: tuple[Metric, ...]
    metric: str | None

    def __post_init__(self) -> None:
        """Check that `--metric` applies to the labels."""
        is_single = self.problem == "single_label_classification"
        data = f"{self.num_labels} labels" if is_single else self.problem
        check_metric(self.metric, (*self._allowed, "loss"), data)

    @property
    def _allowed(self) -> tuple[Metric, ...]:
        is_binary = self.problem == "single_label_classification" and self.num_labels == 2
        return (*_ALLOWED[self.problem], "f1") if is_binary else _ALLOWED[self.problem]

    @property
    def best_metric(self) -> str:
        """The metric that selects the best checkpoint."""
        return self.metric or (self.official[0] if len(self.official) == 1 else COMBINED)

    def _figures(self, logits_NK: Tensor, targets_N: Tensor) -> dict[str, float]:
        """Return the metrics of logits (N, K), and the mean of the official metrics.

        Macro-F1 is always included for labels, because accuracy hides rare labels.
        """
        others = (name for name in self._allowed if name in ("macro_f1", self.metric))
        metrics = tuple(dict.fromkeys((*self.official, *others)))
        figures = compute_metrics(metrics, logits_NK.numpy(), targets_N.numpy())
        if len(self.official) == 1:
            return figures
        return {**figures, COMBINED: mean_metric({name: figures[name] for name in self.official})}

    def calibrated(self, logits_NK: Tensor, targets_N: Tensor) -> dict[str, float]:
        """Return the metrics and, except for a regression, the calibration metrics."""
        figures = self._figures(logits_NK, targets_N)
        if self.problem != "regression":
            figures |= calibration_metrics(logits_NK.float(), targets_N)
        return figures


def head_metric_name(head: str, metric: str) -> str:
    """Return the name of a metric of a named head, from its name for the default head."""
    return f"{PREFIX}/{head}{metric.removeprefix(PREFIX)}"


@dataclass(frozen=True, kw_only=True)
class TextPredictions:
    """A model's predictions for labelled texts.

    Attributes:
        names: names of the labels, or of the score.
        logits: (N, K) logits in fp32.
        num_truncated: number of truncated texts.
        temperature: temperature of the classifier, which divides its logits.
    """

    texts: Sequence[LabelledText]
    names: Sequence[str]
    problem: ProblemType
    logits: NDArray[np.float32]
    num_truncated: int = 0
    temperature: float = 1.0

    @cached_property
    def targets(self) -> NDArray[Any]:
        """The label indices or scores (N,), or 1 and 0 (N, K) if texts can have several labels."""
        dtype = np.int64 if self.problem == "multi_label_classification" else None
        return np.array([text.label for text in self.texts], dtype)

    @cached_property
    def predictions(self) -> NDArray[Any]:
        """The predictions, in the shape of the targets."""
        return predictions_of(self.logits, several=self.problem == "multi_label_classification")

    @cached_property
    def losses_N(self) -> NDArray[np.float32]:
        """The loss of each text: cross-entropy (the mean over several labels), or squared error."""
        logits_NK = torch.from_numpy(self.logits)
        losses: Tensor
        if self.problem == "regression":
            losses = (logits_NK[:, 0] - torch.from_numpy(self.targets).float()).square()
        elif self.problem == "multi_label_classification":
            targets_NK = torch.from_numpy(self.targets).float()
            losses = F.binary_cross_entropy_with_logits(logits_NK, targets_NK, reduction="none")
            losses = losses.mean(-1)
        else:
            losses = F.cross_entropy(logits_NK, torch.from_numpy(self.targets), reduction="none")
        loss_N: NDArray[np.float32] = losses.numpy()
        return loss_N

    @property
    def confusion(self) -> dict[str, dict[str, int]]:
        """The numbers of texts by true and predicted label, or {} unless texts have one label."""
        if self.problem != "single_label_classification":
            return {}
        from sklearn.metrics import confusion_matrix  # importing scikit-learn takes a second

        counts_KK = confusion_matrix(self.targets, self.predictions, labels=range(len(self.names)))
        return {
            name: {other: count for other, count in zip(self.names, row, strict=True) if count}
            for name, row in zip(self.names, counts_KK.tolist(), strict=True)
        }

    def describe(self, value: Any) -> str:
        """Format a target or a prediction, as label names or as a number."""
        if self.problem == "regression":
            return f"{float(value):.4g}"
        if self.problem == "single_label_classification":
            return self.names[int(value)]
        return ",".join(name for name, has in zip(self.names, value, strict=True) if has)

    def figures(self, metrics: Sequence[Metric] = ()) -> dict[str, Any]:
        """Return metrics, loss, counts and, except for a regression, the metrics of each label."""
        all_metrics = dict.fromkeys((*_METRICS[self.problem], *metrics))
        figures: dict[str, Any] = {
            **compute_metrics(tuple(all_metrics), self.logits, self.targets),
            "loss": float(self.losses_N.astype(np.float64).mean()),
        }
        figures |= {"texts": len(self.texts), "truncated": self.num_truncated}
        if self.problem != "regression":
            logits_NK, targets_N = map(torch.from_numpy, (self.logits, self.targets))
            figures["temperature"] = self.temperature
            error = calibration_error(logits_NK / self.temperature, targets_N)
            figures["calibration_error"] = error
            figures["classes"] = self.classes()
        if self.confusion:
            figures["confusion"] = self.confusion
        return {f"{PREFIX}_{name}": value for name, value in figures.items()}

    def classes(self) -> dict[str, dict[str, float]]:
        """Return precision, recall, F1 and the number of texts of each label."""
        from sklearn.metrics import precision_recall_fscore_support  # importing this takes a second

        precisions, recalls, f1s, counts = precision_recall_fscore_support(
            self.targets,
            self.predictions,
            labels=range(len(self.names)),
            average=None,
            zero_division=0.0,
        )
        return {
            name: {
                "precision": float(precisions[index]),
                "recall": float(recalls[index]),
                "f1": float(f1s[index]),
                "texts": int(counts[index]),
            }
            for index, name in enumerate(self.names)
        }


def classify(
    runner: Runner,
    tokenizer: AlbertTokenizer,
    texts: Sequence[LabelledText],
    names: Sequence[str],
    problem: ProblemType = "single_label_classification",
    *,
    length: int,
    truncation: bool = True,
    outputs: Sequence[int] | None = None,
    head: Task = CLASSIFICATION,
) -> TextPredictions:
    """Classify labelled texts.

    Args:
        names: names of the labels.
        length: maximum number of tokens in a text or pair.
        truncation: whether to truncate longer texts instead of rejecting them.
        outputs: index of the model's output for each label, or None if the order is the same.
        head: name of the classifier.
    """
    examples, num_truncated = labelled_examples(
        texts, tokenizer, length=length, truncation=truncation
    )
    logits_NK = _logits(runner, examples, head)
    if outputs is not None:
        logits_NK = logits_NK[:, list(outputs)]
    return TextPredictions(
        texts=texts,
        names=names,
        problem=problem,
        logits=logits_NK,
        num_truncated=num_truncated,
    )


def _logits(
    runner: Runner, examples: Sequence[TokenisedExample], head: Task
) -> NDArray[np.float32]:
    """Return the logits (N, K) of the examples."""
    items = [
        EngineItem(
            inputs=[EncoderInput(ids=example.ids, types=example.types, task=head, rows=[0])],
            decode=lambda logits: list(logits[0]),
        )
        for example in examples
    ]
    return np.stack(predict(runner, items, "texts"))


def fit_temperature(logits_NK: Tensor, targets_N: Tensor) -> float:
    """Return the temperature, which divides logits, of least cross-entropy (Guo et al. 2017).

    The targets are smoothed by 1 / (N + 2), as in Platt scaling. Otherwise, the temperature would
    be 0 if all predictions were right.

    Args:
        targets_N: label indices (N,), or 1 and 0 (N, K) if texts can have several labels.
    """
    from scipy.optimize import minimize_scalar  # importing SciPy takes a second

    logits_NK, smoothing = logits_NK.double(), 1 / (len(logits_NK) + 2)

    def loss(log: float) -> float:
        scaled_NK = logits_NK / exp(log)
        if targets_N.ndim == 1:
            return F.cross_entropy(scaled_NK, targets_N, label_smoothing=smoothing).item()
        smooth_NK = targets_N * (1 - smoothing) + smoothing / 2
        return F.binary_cross_entropy_with_logits(scaled_NK, smooth_NK.double()).item()

    return exp(
        minimize_scalar(
            loss, bounds=(-_MAX_LOG_TEMPERATURE, _MAX_LOG_TEMPERATURE), method="bounded"
        ).x
    )


def calibration_error(logits_NK: Tensor, targets_N: Tensor) -> float:
    """Return the expected calibration error: the mean gap between confidence and accuracy.

    Args:
        logits_NK: logits divided by the temperature.
        targets_N: targets, as in `fit_temperature`. Each of several labels counts as a prediction.
    """
    if targets_N.ndim == 1:
        confidence_N, labels_N = logits_NK.double().softmax(-1).max(-1)
        is_right_N = labels_N == targets_N
    else:
        confidence_N, is_right_N = logits_NK.double().sigmoid().ravel(), targets_N.ravel()
    bins_N = (confidence_N * _NUM_BINS).long().clamp(max=_NUM_BINS - 1)
    sums = torch.bincount(bins_N, confidence_N - is_right_N.double())
    return sums.abs().sum().item() / len(bins_N)


def calibration_metrics(logits_NK: Tensor, targets_N: Tensor) -> dict[str, float]:
    """Return the fitted temperature, and the calibration errors with and without it."""
    if not logits_NK.isfinite().all():  # the run has diverged
        return {"temperature": 1.0, "calibration_error": nan, "raw_calibration_error": nan}
    temperature = fit_temperature(logits_NK, targets_N)
    return {
        "temperature": temperature,
        "calibration_error": calibration_error(logits_NK / temperature, targets_N),
        "raw_calibration_error": calibration_error(logits_NK, targets_N),
    }
