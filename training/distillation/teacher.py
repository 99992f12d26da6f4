"""A teacher: any encoder that `transformers` loads, with its tokenizer.

Shape legend: C sequences, N teacher's tokens of the longest, H teacher's hidden size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from albert_serve.progress import is_quiet
from training.errors import TrainingError

# Encoders whose position ids begin after the id of padding.
_OFFSET_POSITIONS: Final = ("roberta", "xlm-roberta", "camembert", "xlm-roberta-xl", "mpnet")


class TeacherError(TrainingError):
    """A teacher that cannot be loaded, or that cannot teach this student."""


@dataclass(frozen=True, slots=True)
class TeacherBatch:
    """Right-padded sequences: ids, types and attention mask, each (C, N)."""

    ids: Tensor
    types: Tensor
    is_real: Tensor


class PieceRange(NamedTuple):
    """A piece of the teacher's tokenizer, and its range of characters in a word."""

    token_id: int
    begin: int
    end: int


class HfTokenizer:
    """Adapter of a fast tokenizer of `transformers` that encodes single words.

    Raises:
        TeacherError: it is not a fast one, or has no token that begins or ends a sequence.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise TeacherError("the teacher's tokenizer is not a fast one; it needs tokenizer.json")
        self.hf = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_padding()
        self._backend.no_truncation()
        self.cls_id = self._special("cls_token_id", "bos_token_id")
        self.sep_id = self._special("sep_token_id", "eos_token_id")
        self.unk_id = self._special("unk_token_id", "mask_token_id")
        self.pad_id = tokenizer.pad_token_id or 0
        self.prefix: str = getattr(self._backend.model, "continuing_subword_prefix", None) or ""

    def _special(self, *names: str) -> int:
        for name in names:
            token_id = getattr(self.hf, name, None)
            if token_id is not None:
                return int(token_id)
        raise TeacherError(f"the teacher's tokenizer has no {names[0]}; it is not an encoder's")

    def encode_word(self, word: str) -> list[PieceRange]:
        """Encode one word, which follows a space, with the character ranges of its pieces."""
        encoded = self._backend.encode(f" {word}", add_special_tokens=False)
        return [
            PieceRange(token_id, max(0, begin - 1), max(0, end - 1))
            for token_id, (begin, end) in zip(encoded.ids, encoded.offsets, strict=True)
        ]

    def continuation(self, piece: str) -> list[int]:
        """Encode a piece within a word: `##ing`, but a comma that is split off is `,`."""
        after_letter = self.encode_word(f"a{piece}")
        if not piece[:1].isalnum() and after_letter and after_letter[0].end == 1:
            return [part.token_id for part in after_letter[1:]]
        token = self._backend.token_to_id(self.prefix + piece)
        # In a byte-level vocabulary "£" stands for a byte, and not for the sign.
        if token is not None and (self.prefix or self._backend.decode([token]).strip() == piece):
            return [token]
        return [part.token_id for part in self.encode_word(piece)]


@dataclass(frozen=True, slots=True)
class Teacher:
    """A frozen encoder in evaluation mode.

    Attributes:
        name: a folder's name, or the model's on the hub.
        model: of `transformers`.
    """

    name: str
    model: Any
    tokenizer: HfTokenizer

    @property
    def hidden_size(self) -> int:
        """Hidden size H."""
        return int(self.model.config.hidden_size)

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return int(self.model.config.num_hidden_layers)

    @property
    def num_types(self) -> int:
        """Number of token types; 0 for an encoder without them."""
        return int(getattr(self.model.config, "type_vocab_size", 0) or 0)

    @property
    def max_positions(self) -> int:
        """Maximum sequence length."""
        return num_positions(self.model.config)

    @torch.no_grad()
    def states(self, batch: TeacherBatch, layers: Sequence[int]) -> tuple[Tensor, ...]:
        """Run the encoder on a batch; return the hidden states (C, N, H) after each layer.

        Args:
            batch: the sequences.
            layers: the layers, from 1; 0 for the embeddings.
        """
        inputs = {"input_ids": batch.ids, "attention_mask": batch.is_real}
        if self.num_types > 1:
            inputs["token_type_ids"] = batch.types
        out = self.model(**inputs, output_hidden_states=True)
        return tuple(out.hidden_states[layer] for layer in layers)


def load_teacher(name: str, device: torch.device) -> Teacher:
    """Load an encoder and its tokenizer from a folder, or from the hub by its name.

    Raises:
        TeacherError: `transformers` is not installed; there is no such model; it is no encoder,
            has no tokenizer, or lacks weights.
    """
    # Hidden states do not need the pooler.
    model, tokenizer = load_encoder(name, "AutoModel", optional=("pooler",))
    model.to(device).eval().requires_grad_(requires_grad=False)
    return Teacher(name=name, model=model, tokenizer=HfTokenizer(tokenizer))


def load_encoder(
    name: str, auto_class: str, *, optional: Sequence[str] = (), **options: Any
) -> tuple[Any, Any]:
    """Load an encoder of `transformers`, in fp32, and its tokenizer.

    Args:
        auto_class: the class that loads it, such as `AutoModelForSequenceClassification`.
        optional: weights whose names contain one of these may be missing.
        options: further options of the class's `from_pretrained`.

    Raises:
        TeacherError: as `load_teacher`.
    """
    try:
        transformers: Any = import_module("transformers")
    except ImportError as error:
        raise TeacherError(
            "a teacher needs the package transformers: pip install transformers"
        ) from error
    if is_quiet():
        transformers.utils.logging.disable_progress_bar()
    config = _loaded(name, transformers.AutoConfig.from_pretrained)
    _check_kind(name, config)
    tokenizer = _loaded(name, transformers.AutoTokenizer.from_pretrained)
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        # Without a tokenizer file, transformers 5 makes one of special tokens alone.
        raise TeacherError(f"{name} has no tokenizer; it needs tokenizer.json, or a vocabulary")
    load = getattr(transformers, auto_class).from_pretrained
    model, report = _loaded(name, load, output_loading_info=True, **options)
    _check_weights(name, report, optional)
    if len(tokenizer) > config.vocab_size:
        raise TeacherError(
            f"{name}: the tokenizer has {len(tokenizer)} tokens, the model {config.vocab_size}; "
            "are they of one model?"
        )
    return model.float(), tokenizer


def num_positions(config: Any) -> int:
    """Return the maximum sequence length of an encoder of this config."""
    offset = config.pad_token_id + 1 if config.model_type in _OFFSET_POSITIONS else 0
    return int(config.max_position_embeddings) - offset


def describe_model(name: str, model: nn.Module) -> dict[str, Any]:
    """Return a teacher's name, without its parent folder, and the hash of its weights."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return {
        "teacher": Path(name).name if Path(name).is_dir() else name,
        "teacher_sha256": digest.hexdigest(),
    }


def _loaded(name: str, load: Any, **options: Any) -> Any:
    try:
        return load(name, **options)
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise TeacherError(f"teacher {name} cannot be loaded: {reason}") from error


def _check_kind(name: str, config: Any) -> None:
    from transformers.models.auto import modeling_auto

    decodes = any(getattr(config, name, False) for name in ("is_decoder", "is_encoder_decoder"))
    if decodes or config.model_type not in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        raise TeacherError(
            f"{name} is a {config.model_type}, not an encoder; "
            "give a BERT, RoBERTa, MiniLM, ELECTRA or ALBERT"
        )


def _check_weights(name: str, report: dict[str, Any], optional: Sequence[str]) -> None:
    missing = sorted(
        key for key in report["missing_keys"] if not any(part in key for part in optional)
    )
    if missing:
        raise TeacherError(
            f"{name} lacks {len(missing)} weights of its model, {missing[0]} among them"
        )
