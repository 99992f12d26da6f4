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
from albert_serve.tasks.fitting import fit
from albert_serve.tasks.grouping import cut_batches
from albert_serve.tokenizer import AlbertTokenizer
from training.data.batch import ExampleBatch, LossName
from training.distillation.teacher import describe_model, load_frozen, num_positions
from training.loop.distributed import World
from training.losses import LogitsFunction, Score, cls_logits
from training.model.heads import AlbertForTasks
from training.system.precision import PrecisionName, precision

Problem: TypeAlias = Literal["single_label", "multi_label", "regression"]
_FILE: Final = "teacher-logits.safetensors"
_TOKENS_A_BATCH: Final = 8192
# Of texts that are longer than the teacher's positions.
_TRUNCATION: Final = "longest_first"
_Text: TypeAlias = "tuple[str, str | None]"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PseudoLabels:
    """A teacher's logits of texts.

    Attributes:
        logits: (N, K) fp32.
        names: of the K labels.
        problem: activation of the logits: softmax, sigmoid, or none.
    """

    logits: Tensor
    names: tuple[str, ...]
    problem: Problem


def pseudo_label(
    texts: Sequence[_Text],
    teacher: str,
    world: World,
    folder: Path,
    products: PrecisionName = "auto",
) -> PseudoLabels:
    """Label texts, or read the labels that an earlier call with the same input wrote.

    The processes of a run divide the texts; all must call it, within `setting_up`.

    Args:
        teacher: a classifier of `transformers`: a folder, or a name on the hub.
        folder: cache of the logits, so that a resumed run has the same ones.
        products: precision of the teacher's matrix products.

    Raises:
        TeacherError: the teacher cannot be loaded, or is no classifier.
        OSError: the folder cannot be written.
    """
    model, tokenizer = load_frozen(teacher, "AutoModelForSequenceClassification", world.device)
    digest = hashlib.sha256(repr(list(texts)).encode())
    key = {
        "texts": digest.hexdigest(),
        "teacher": describe_model(teacher, model)["teacher_sha256"],
        "truncation": _TRUNCATION,
    }
    logits = _read(folder / _FILE, key)
    if world.meet(logits is None) or logits is None:
        with precision(world.device, products):
            logits, num_cut = _classify(texts, model, tokenizer, world)
        if num_cut:
            print(f"{num_cut:,} of {len(texts):,} texts are cut to what {teacher} reads")
        if world.is_main:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / _FILE, save({"logits": logits}, metadata=key))
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
def _classify(
    texts: Sequence[_Text], model: Any, tokenizer: Any, world: World
) -> tuple[Tensor, int]:
    """Return the logits (N, K), and how many texts were cut to the teacher's positions."""
    backend = tokenizer.backend_tokenizer
    backend.no_padding()
    backend.no_truncation()
    limit = num_positions(model.config)
    encoded = [
        tokenizer(text, pair, truncation=_TRUNCATION, max_length=limit, padding=False)
        for text, pair in progress(texts, title="tokenising for the teacher", unit="texts")
    ]
    sizes = np.array([len(encoding["input_ids"]) for encoding in encoded])
    num_cut = sum(bool(encoding.encodings[0].overflowing) for encoding in encoded)
    batches = cut_batches(np.argsort(sizes, kind="stable").tolist(), sizes, _TOKENS_A_BATCH)
    logits_NK = torch.zeros((len(texts), model.config.num_labels))
    own = batches[world.rank :: world.size]
    for batch in progress(own, title="labelling texts", unit="batches"):
        padded = tokenizer.pad([encoded[index] for index in batch], return_tensors="pt")
        out = model(**padded.to(world.device))
        logits_NK[batch] = out.logits.float().cpu()
    world.meet()
    return world.sum_tensors(logits_NK), num_cut


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PseudoLabelledExample:
    """A tokenised text, and the teacher's logits (K,)."""

    ids: list[int]
    types: list[int]
    target: Tensor


def pseudo_labelled_examples(
    texts: Sequence[_Text], labels: PseudoLabels, tokenizer: AlbertTokenizer, *, length: int
) -> list[PseudoLabelledExample]:
    """Tokenise texts, cut to `length` tokens, with their teacher's logits."""
    fitted = [
        fit(tokenizer, text, pair, max_positions=length, truncation="truncate")
        for text, pair in progress(texts, title="tokenising texts", unit="texts")
    ]
    num_cut = sum(each.num_truncated > 0 for each in fitted)
    if num_cut:
        print(f"{num_cut:,} of {len(texts):,} texts are cut to {length} tokens")
    return [
        PseudoLabelledExample(ids=each.encoding.ids, types=each.encoding.types, target=logits)
        for each, logits in zip(fitted, labels.logits, strict=True)
    ]


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
