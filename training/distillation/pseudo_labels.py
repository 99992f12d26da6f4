"""Task distillation: a teacher's logits or embeddings of texts, computed once and stored.

Shape legend: N texts, B texts of a batch, S positions, H hidden size, K labels, or the size of an
embedding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import safetensors
import torch
from safetensors.torch import load_file, save
from torch import Tensor
from torch.nn import functional as F

from albert_serve.bundle.manifest import ProblemType
from albert_serve.bundle.sentence_vectors import (
    SENTENCE_FILES,
    SentencePooling,
    SentenceVectors,
    encoder_folder,
    read_sentence_vectors,
)
from albert_serve.files import write_atomically
from albert_serve.hub import HubModel, download
from albert_serve.progress import progress
from albert_serve.tasks.grouping import cut_batches
from albert_serve.tasks.truncation import Truncator
from albert_serve.tokenizer import AlbertTokenizer
from training.data.batch import ExampleBatch, LossName, TokenisedExample
from training.distillation.teacher import describe_model, load_encoder, num_positions
from training.loop.distributed import World
from training.losses import LogitsFunction, LossFunction, LossSums, cls_logits
from training.model.heads import AlbertForTasks
from training.system.precision import PrecisionName, precision

# Files that define the pooling of a teacher.
_POOLING_FILES: Final = ("config.json", "tokenizer_config.json", *SENTENCE_FILES)
_TOKENS_A_BATCH: Final = 8192
# Strategy for texts that are longer than the teacher's positions.
_TRUNCATION: Final = "longest_first"
_Text: TypeAlias = "tuple[str, str | None]"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TaskTeacher:
    """A finetuned classifier of `transformers`.

    Attributes:
        reference: folder, or name on the Hub.
        names: names of the K labels.
        problem: kind of the task, which decides the activation: softmax, sigmoid, or none.
    """

    reference: str
    model: Any
    tokenizer: Any
    names: tuple[str, ...]
    problem: ProblemType

    @classmethod
    def load(cls, reference: str, device: torch.device) -> TaskTeacher:
        """Load a teacher from a folder, or by its name on the hub.

        Raises:
            TeacherError: it cannot be loaded, or is not a classifier.
        """
        model, tokenizer = load_encoder(reference, "AutoModelForSequenceClassification")
        model.to(device).eval().requires_grad_(requires_grad=False)
        config = model.config
        return cls(
            reference=reference,
            model=model,
            tokenizer=tokenizer,
            names=tuple(str(config.id2label[index]) for index in range(config.num_labels)),
            problem=_problem(config),
        )

    @property
    def num_outputs(self) -> int:
        """The number of labels."""
        return len(self.names)

    def outputs(self, padded: Mapping[str, Tensor]) -> Tensor:
        """Return the logits (B, K) of a batch of texts."""
        logits_BK: Tensor = self.model(**padded).logits
        return logits_BK.float()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EmbeddingTeacher:
    """An encoder of `transformers` or sentence-transformers; its embeddings have length 1.

    Attributes:
        reference: folder, or name on the Hub.
        pooling: pooling in `modules.json`; the mean without this file.
    """

    reference: str
    model: Any
    tokenizer: Any
    pooling: SentencePooling

    @classmethod
    def load(cls, reference: str, device: torch.device) -> EmbeddingTeacher:
        """Load a teacher from a folder, or by its name on the hub.

        Raises:
            TeacherError: it cannot be loaded, or is not an encoder.
            ConfigError, HubError: its `modules.json` cannot be read, or has unsupported modules.
        """
        folder, encoder = Path(reference), reference
        if folder.is_dir():
            encoder = str(encoder_folder(folder))
        else:
            folder = download(HubModel(repo_id=reference), _POOLING_FILES)
        vectors = read_sentence_vectors(folder) or SentenceVectors()
        model, tokenizer = load_encoder(encoder, "AutoModel", optional=("pooler",))
        model.to(device).eval().requires_grad_(requires_grad=False)
        return cls(reference=reference, model=model, tokenizer=tokenizer, pooling=vectors.pooling)

    @property
    def num_outputs(self) -> int:
        """The size of an embedding."""
        return int(self.model.config.hidden_size)

    def outputs(self, padded: Mapping[str, Tensor]) -> Tensor:
        """Return the embeddings (B, H) of a batch of texts."""
        states_BSH = self.model(**padded).last_hidden_state.float()
        is_real_BS1 = padded["attention_mask"][..., None]
        pooled = {
            "mean": lambda: (states_BSH * is_real_BS1).sum(1),  # is normalised below
            "cls": lambda: states_BSH[:, 0],
            "max": lambda: states_BSH.masked_fill(is_real_BS1 == 0, -torch.inf).amax(1),
        }
        return F.normalize(pooled[self.pooling](), dim=-1)


def pseudo_label(
    texts: Sequence[_Text],
    teacher: TaskTeacher | EmbeddingTeacher,
    world: World,
    file: Path,
    products: PrecisionName = "auto",
) -> Tensor:
    """Return a teacher's outputs (N, K) for texts, from the cache of an earlier call if it exists.

    The processes of a run divide the texts; all must call it, within `setting_up`.

    Args:
        file: cache of the outputs, so that a resumed run has the same ones.
        products: precision of the teacher's matrix products.

    Raises:
        OSError: the file cannot be written.
    """
    digest = hashlib.sha256(repr(list(texts)).encode())
    key = {
        "texts": digest.hexdigest(),
        "teacher": describe_model(teacher.reference, teacher.model)["teacher_sha256"],
        "truncation": _TRUNCATION,
    }
    if isinstance(teacher, EmbeddingTeacher):
        key["pooling"] = teacher.pooling
    logits = _read(file, key)
    if world.meet(logits is None) or logits is None:
        with precision(world.device, products):
            logits, num_truncated = _label(texts, teacher, world)
        if num_truncated:
            print(
                f"{num_truncated:,} of {len(texts):,} texts were truncated to the positions of "
                f"{teacher.reference}"
            )
        if world.is_main:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, save({"logits": logits}, metadata=key))
    return logits


def _problem(config: Any) -> ProblemType:
    if config.problem_type == "multi_label_classification":
        return "multi_label_classification"
    return "regression" if config.num_labels == 1 else "single_label_classification"


def _read(file: Path, key: Mapping[str, str]) -> Tensor | None:
    """Read the cached logits; None without a cache, or if its key differs."""
    try:
        with safetensors.safe_open(file, "pt") as opened:
            metadata = opened.metadata()
    except (OSError, safetensors.SafetensorError):
        return None
    return load_file(file)["logits"] if metadata == dict(key) else None


@torch.no_grad()
def _label(
    texts: Sequence[_Text], teacher: TaskTeacher | EmbeddingTeacher, world: World
) -> tuple[Tensor, int]:
    """Return the outputs (N, K), and the number of texts truncated to the teacher's positions."""
    tokenizer = teacher.tokenizer
    backend = tokenizer.backend_tokenizer
    backend.no_padding()
    backend.no_truncation()
    limit = num_positions(teacher.model.config)
    encoded = [
        tokenizer(text, pair, truncation=_TRUNCATION, max_length=limit, padding=False)
        for text, pair in progress(texts, title="tokenising for the teacher", unit="texts")
    ]
    sizes = np.array([len(encoding["input_ids"]) for encoding in encoded])
    num_truncated = sum(bool(encoding.encodings[0].overflowing) for encoding in encoded)
    batches = cut_batches(np.argsort(sizes, kind="stable").tolist(), sizes, _TOKENS_A_BATCH)
    outputs_NK = torch.zeros((len(texts), teacher.num_outputs))
    rank_batches = batches[world.rank :: world.size]
    for batch in progress(rank_batches, title="labelling texts", unit="batches"):
        padded = tokenizer.pad([encoded[index] for index in batch], return_tensors="pt")
        outputs_NK[batch] = teacher.outputs(padded.to(world.device)).cpu()
    world.meet()
    return world.sum_tensors(outputs_NK), num_truncated


def pseudo_labelled_examples(
    texts: Sequence[_Text], logits_NK: Tensor, tokenizer: AlbertTokenizer, *, length: int
) -> list[TokenisedExample]:
    """Tokenise texts, truncated to `length` tokens, with their teacher's logits."""
    truncator = Truncator(tokenizer, length, "truncate")
    fitted = [
        truncator.fit_texts(text, pair)
        for text, pair in progress(texts, title="tokenising texts", unit="texts")
    ]
    num_truncated = sum(text.num_truncated > 0 for text in fitted)
    if num_truncated:
        print(f"{num_truncated:,} of {len(texts):,} texts were truncated to {length} tokens")
    return [
        TokenisedExample(ids=text.encoding.ids, types=text.encoding.types, target=logits)
        for text, logits in zip(fitted, logits_NK, strict=True)
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class PseudoLabelLoss:
    """Loss function of text classification against a teacher's logits.

    Attributes:
        held_out: loss function of validation, whose targets are labels.
    """

    problem: ProblemType
    temperature: float
    held_out: LossFunction
    logits: LogitsFunction = cls_logits

    def __call__(self, model: AlbertForTasks, batch: ExampleBatch) -> Mapping[LossName, LossSums]:
        """Return the loss of a batch, whose targets are logits (C, K) in training."""
        if not model.training:
            return self.held_out(model, batch)
        logits_BK = self.logits(model, batch).float()
        loss = distillation_loss(logits_BK, batch.targets, self.problem, self.temperature)
        right = agreement(logits_BK, batch.targets, self.problem)
        return {batch.task: LossSums(loss=loss, right=right, count=len(logits_BK))}


def distillation_loss(
    logits_BK: Tensor, targets_BK: Tensor, problem: ProblemType, temperature: float
) -> Tensor:
    """Return the summed loss of a student's logits against its teacher's.

    The loss follows Hinton et al. 2015, section 2. Single label: KL divergence (nats) of the
    probabilities at the temperature, times its square, so that gradients do not depend on it.
    Multi-label: binary cross-entropy of each label, scaled alike. Regression: squared error.
    """
    if problem == "regression":
        return F.mse_loss(logits_BK, targets_BK, reduction="sum")
    logits, targets = logits_BK / temperature, targets_BK / temperature
    if problem == "multi_label_classification":
        loss = F.binary_cross_entropy_with_logits(logits, targets.sigmoid(), reduction="none")
        return loss.mean(-1).sum() * temperature**2
    divergence = F.kl_div(
        logits.log_softmax(-1), targets.log_softmax(-1), reduction="sum", log_target=True
    )
    return divergence * temperature**2


def agreement(logits_BK: Tensor, targets_BK: Tensor, problem: ProblemType) -> Tensor:
    """Count texts with the same best label; the mean of equal labels; or numbers within 0.5."""
    if problem == "regression":
        return ((logits_BK - targets_BK).abs() < 0.5).all(-1).sum()
    if problem == "multi_label_classification":
        return ((logits_BK > 0) == (targets_BK > 0)).float().mean(-1).sum()
    return (logits_BK.argmax(-1) == targets_BK.argmax(-1)).sum()
