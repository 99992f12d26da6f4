"""Task distillation: a finetuned teacher's logits as pseudo-labels.

Shape legend: N texts, B texts of a batch, S positions, H hidden size, K labels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import safetensors
import torch
from safetensors.torch import load_file, save
from torch import Tensor
from torch.nn import functional as F

from albert_serve.files import write_atomically
from albert_serve.progress import progress
from albert_serve.tasks.grouping import cut_batches
from albert_serve.tokenizer import AlbertTokenizer
from training.data.batch import ExampleBatch, LossName
from training.distillation.teacher import TeacherError, describe_model, load_frozen, num_positions
from training.losses import LogitsFunction, Score, cls_logits
from training.model.heads import AlbertForTasks
from training.system.precision import PrecisionName, precision

Problem: TypeAlias = Literal["single_label", "multi_label", "regression"]
_FILE: Final = "teacher-logits.safetensors"
_TOKENS_A_BATCH: Final = 8192
_Text: TypeAlias = "tuple[str, str | None]"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PseudoLabels:
    """A teacher's logits of texts.

    Attributes:
        logits: (N, K) fp32; rows of nan for texts longer than the teacher's positions.
        names: of the K labels.
        problem: activation of the logits: softmax, sigmoid, or none.
    """

    logits: Tensor
    names: tuple[str, ...]
    problem: Problem


def pseudo_label(
    texts: Sequence[_Text],
    teacher: str,
    device: torch.device,
    folder: Path,
    products: PrecisionName = "auto",
) -> PseudoLabels:
    """Label texts, or read the labels that an earlier call with the same input wrote.

    Args:
        teacher: a classifier of `transformers`: a folder, or a name on the hub.
        folder: cache of the logits, so that a resumed run has the same ones.
        products: precision of the teacher's matrix products.

    Raises:
        TeacherError: the teacher cannot be loaded, is no classifier, or all texts are too long.
        OSError: the folder cannot be written.
    """
    model, tokenizer = load_frozen(teacher, "AutoModelForSequenceClassification", device)
    digest = hashlib.sha256(repr(list(texts)).encode())
    key = {"texts": digest.hexdigest(), "teacher": describe_model(teacher, model)["teacher_sha256"]}
    logits = _read(folder / _FILE, key)
    if logits is None:
        with precision(device, products):
            logits = _classify(texts, model, tokenizer, device)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / _FILE, save({"logits": logits}, metadata=key))
    num_long = int(logits.isnan().any(1).sum())
    if num_long == len(texts):
        raise TeacherError(f"no text fits into what {teacher} reads")
    if num_long:
        print(f"{num_long} of {len(texts)} texts are longer than {teacher} reads: left out")
    config = model.config
    names = tuple(str(config.id2label[index]) for index in range(logits.shape[1]))
    return PseudoLabels(logits=logits, names=names, problem=_problem(config, len(names)))


def _problem(config: Any, num_labels: int) -> Problem:
    if config.problem_type == "multi_label_classification":
        return "multi_label"
    return "regression" if num_labels == 1 else "single_label"


def _read(file: Path, key: Mapping[str, str]) -> Tensor | None:
    """Read the cached logits; None if the key differs or there are none."""
    try:
        with safetensors.safe_open(file, "pt") as opened:
            metadata = opened.metadata()
    except (OSError, safetensors.SafetensorError):
        return None
    return load_file(file)["logits"] if metadata == dict(key) else None


@torch.no_grad()
def _classify(texts: Sequence[_Text], model: Any, tokenizer: Any, device: torch.device) -> Tensor:
    backend = tokenizer.backend_tokenizer
    backend.no_padding()
    backend.no_truncation()
    encoded = [
        tokenizer(text, pair, truncation=False, padding=False)
        for text, pair in progress(texts, title="tokenising for the teacher", unit="texts")
    ]
    sizes = np.array([len(encoding["input_ids"]) for encoding in encoded])
    limit = num_positions(model.config)
    order = np.argsort(sizes, kind="stable")
    batches = cut_batches(order[sizes[order] <= limit].tolist(), sizes, _TOKENS_A_BATCH)
    logits_NK = torch.full((len(texts), model.config.num_labels), torch.nan)
    for batch in progress(batches, title="labelling texts", unit="batches"):
        padded = tokenizer.pad([encoded[index] for index in batch], return_tensors="pt")
        out = model(**padded.to(device))
        logits_NK[batch] = out.logits.float().cpu()
    return logits_NK


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PseudoLabelledExample:
    """A tokenised text, and the teacher's logits (K,)."""

    ids: list[int]
    types: list[int]
    target: Tensor


def pseudo_labelled_examples(
    texts: Sequence[_Text], labels: PseudoLabels, tokenizer: AlbertTokenizer, *, length: int
) -> list[PseudoLabelledExample]:
    """Tokenise the texts that fit into `length` tokens, with their teacher's logits.

    Raises:
        TeacherError: no text fits.
    """
    examples = [
        PseudoLabelledExample(ids=encoding.ids, types=encoding.types, target=logits)
        for (text, pair), logits in zip(texts, labels.logits, strict=True)
        if not bool(logits.isnan().any())
        for encoding in [tokenizer.encode(text, pair)]
        if len(encoding) <= length
    ]
    if not examples:
        raise TeacherError(f"no text fits into {length} tokens; give a larger --length")
    if len(examples) < len(texts):
        print(f"{len(texts) - len(examples)} of {len(texts)} texts are too long: left out")
    return examples


@dataclass(frozen=True, kw_only=True, slots=True)
class PseudoLabelLoss:
    """Loss function of text classification against a teacher's logits."""

    problem: Problem
    temperature: float
    logits: LogitsFunction = cls_logits

    def __call__(self, model: AlbertForTasks, batch: ExampleBatch) -> dict[LossName, Score]:
        """Return the score of a batch, whose targets are logits (C, K)."""
        logits_BK = self.logits(model, batch).float()
        loss = distillation_loss(logits_BK, batch.targets, self.problem, self.temperature)
        right = agreement(logits_BK, batch.targets, self.problem)
        return {batch.task: Score(loss=loss, right=right, count=len(logits_BK))}


def distillation_loss(
    logits_BK: Tensor, targets_BK: Tensor, problem: Problem, temperature: float
) -> Tensor:
    """Return the summed loss of a student's logits against its teacher's.

    As in Hinton et al. 2015, section 2. Single label: KL divergence (nats) of the probabilities at
    the temperature, times its square, so that gradients do not depend on it. Multi-label: binary
    cross-entropy of each label, likewise. Regression: squared error.
    """
    if problem == "regression":
        return F.mse_loss(logits_BK, targets_BK, reduction="sum")
    logits, targets = logits_BK / temperature, targets_BK / temperature
    if problem == "multi_label":
        loss = F.binary_cross_entropy_with_logits(logits, targets.sigmoid(), reduction="none")
        return loss.mean(-1).sum() * temperature**2
    divergence = F.kl_div(
        logits.log_softmax(-1), targets.log_softmax(-1), reduction="sum", log_target=True
    )
    return divergence * temperature**2


def agreement(logits_BK: Tensor, targets_BK: Tensor, problem: Problem) -> Tensor:
    """Count texts with the same best label; the mean of equal labels; or numbers within 0.5."""
    if problem == "regression":
        return ((logits_BK - targets_BK).abs() < 0.5).all(-1).sum()
    if problem == "multi_label":
        return ((logits_BK > 0) == (targets_BK > 0)).float().mean(-1).sum()
    return (logits_BK.argmax(-1) == targets_BK.argmax(-1)).sum()
