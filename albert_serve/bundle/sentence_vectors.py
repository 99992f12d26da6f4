"""The form of embeddings, in the files of `sentence-transformers`.

A folder with `modules.json` is a sentence-transformers model: the encoder (Transformer), then
Pooling, then Normalize. Its maximum length is the encoder's `max_seq_length` or, if version 6 saved
the model, the tokenizer's `model_max_length`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, Field, JsonValue, TypeAdapter

from albert_serve.errors import ConfigError, describe_faults
from albert_serve.files import read_small_file, write_atomically

SentencePooling: TypeAlias = Literal["mean", "cls", "max"]

MODULES_FILE: Final = "modules.json"
# Patterns of the files that a download needs.
SENTENCE_FILES: Final = (
    MODULES_FILE, "config_sentence_transformers.json", "sentence_*_config.json",
    "*_Pooling/config.json", "config_setfit.json", "model_head.pkl",
)  # fmt: skip
_SETTINGS_FILE: Final = "config_sentence_transformers.json"
_SETFIT_FILES: Final = ("model_head.pkl", "config_setfit.json")
_POOLING_FOLDER: Final = "1_Pooling"
_LIBRARY: Final = "sentence_transformers."
_MODULES: Final = (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"])
_MODE_KEY: Final = "pooling_mode"
_MAX_BYTES: Final = 1 << 20
# The shortest encoded text is [CLS], one token and [SEP].
_MIN_LENGTH: Final = 3

_ContentT = TypeVar("_ContentT")


@dataclass(frozen=True, kw_only=True, slots=True)
class SentenceVectors:
    """The form of the embeddings that a model was trained to give.

    Attributes:
        pooling: the mean of all token vectors including [CLS] and [SEP], the vector of [CLS], or
            the maximum over all tokens in each dimension.
        normalize: whether a vector is scaled to length 1.
        max_length: maximum number of tokens, including [CLS] and [SEP], or None for all positions.
    """

    pooling: SentencePooling = "mean"
    normalize: bool = False
    max_length: int | None = None

    def __post_init__(self) -> None:
        if self.max_length is not None and self.max_length < _MIN_LENGTH:
            raise ConfigError(
                f"max_length is {self.max_length}. Use at least {_MIN_LENGTH}, for [CLS], a token "
                "and [SEP]."
            )


class _Module(BaseModel):
    # A path must not leave the folder.
    path: str = Field(pattern=r"^(\w[\w.-]*)?$")
    type: str

    @property
    def kind(self) -> str:
        """The class name of one of the library's modules, or another module's complete type."""
        return self.type.rpartition(".")[2] if self.type.startswith(_LIBRARY) else self.type


class _Keys(BaseModel):
    """The supported keys in the files of `sentence-transformers`, the tokenizer and the encoder."""

    default_prompt_name: str | None = None
    prompts: dict[str, str | None] = {}
    truncate_dim: int | None = None
    max_seq_length: int | None = Field(None, ge=_MIN_LENGTH)
    do_lower_case: bool = False
    model_max_length: int | None = Field(None, ge=_MIN_LENGTH)
    max_position_embeddings: int = 512


def write_sentence_vectors(vectors: SentenceVectors, folder: Path, *, hidden_size: int) -> None:
    """Write the files that any version of `sentence-transformers` needs to read a checkpoint."""
    paths = {"Transformer": "", "Pooling": _POOLING_FOLDER, "Normalize": "2_Normalize"}
    modes = {"cls_token": "cls", "mean_tokens": "mean", "max_tokens": "max"}
    pooling = {f"{_MODE_KEY}_{key}": mode == vectors.pooling for key, mode in modes.items()}
    limit = {} if vectors.max_length is None else {"max_seq_length": vectors.max_length}
    files: dict[str, JsonValue] = {
        f"{_POOLING_FOLDER}/config.json": {"word_embedding_dimension": hidden_size, **pooling},
        "sentence_bert_config.json": {**limit, "do_lower_case": False},
        _SETTINGS_FILE: {"prompts": {}, "similarity_fn_name": "cosine"},
        MODULES_FILE: [
            {"idx": i, "name": str(i), "path": paths[kind], "type": f"{_LIBRARY}models.{kind}"}
            for i, kind in enumerate(_MODULES[vectors.normalize])
        ],
    }
    (folder / _POOLING_FOLDER).mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_atomically(folder / name, (json.dumps(content, indent=2) + "\n").encode())


def encoder_folder(folder: Path) -> Path:
    """Return the folder of a checkpoint's encoder, which `modules.json` may name."""
    modules = _read(folder / MODULES_FILE, list[_Module], [])
    return folder / modules[0].path if modules else folder


def read_sentence_vectors(folder: Path) -> SentenceVectors | None:
    """Return the form of a checkpoint's embeddings, or None if it is not an embedding model."""
    # A SetFit head is a pickle file, which could run any code.
    if setfit := [name for name in _SETFIT_FILES if (folder / name).exists()]:
        raise ConfigError(
            f"{folder} is a SetFit model ({', '.join(setfit)}), whose classifier is not supported. "
            f"To use its encoder, copy the folder without {' and '.join(_SETFIT_FILES)}. To train "
            "a classifier, run `finetune` on the labelled texts."
        )
    modules = _read(folder / MODULES_FILE, list[_Module], [])
    if not modules:
        return None
    _check_settings(folder / _SETTINGS_FILE)
    kinds = [module.kind for module in modules]
    if kinds == ["Transformer"]:  # a cross-encoder
        return None
    if kinds not in _MODULES:
        raise ConfigError(
            f"{folder / MODULES_FILE} has the modules {', '.join(kinds)}; supported are "
            "Transformer, Pooling and, optionally, Normalize. Remove the file to use the "
            "Transformer alone."
        )
    return SentenceVectors(
        pooling=_read_pooling(folder / modules[1].path / "config.json"),
        normalize="Normalize" in kinds,
        max_length=_read_max_length(folder / modules[0].path),
    )


def _check_settings(file: Path) -> None:
    settings = _read(file, _Keys, _Keys())
    if settings.truncate_dim is not None:
        raise ConfigError(
            f"{file} has truncate_dim {settings.truncate_dim}, which is not supported. Set it to "
            "null, and use the first numbers of the resulting vectors."
        )
    if settings.prompts.get(settings.default_prompt_name or ""):
        raise ConfigError(
            f"{file} has a prompt before every text (default_prompt_name is "
            f"{settings.default_prompt_name!r}), which is not supported. Set it to null, and write "
            "the prompt before the texts of your requests."
        )


def _read_pooling(file: Path) -> SentencePooling:
    """Return the pooling, which versions of the library before 6 write as several booleans."""
    config = _read(file, dict[str, Any])
    modes = config.get(_MODE_KEY)
    if modes is None:
        active = [key for key, value in config.items() if key.startswith(_MODE_KEY) and value]
        names = [key.removeprefix(f"{_MODE_KEY}_").removesuffix("_tokens") for key in active]
        modes = [name.removesuffix("_token") for name in names] or ["mean"]
    poolings: tuple[SentencePooling, ...] = ("mean", "cls", "max")
    for pooling in poolings:
        if modes in (pooling, [pooling]):
            return pooling
    raise ConfigError(
        f"{file} has the pooling {modes}, which is not supported. Use mean, cls or max."
    )


def _read_max_length(encoder: Path) -> int | None:
    """Return the maximum number of tokens, if it is less than the number of positions."""
    limit = None
    for file in encoder.glob("sentence_*_config.json"):
        config = _read(file, _Keys)
        limit = config.max_seq_length
        if config.do_lower_case:
            raise ConfigError(
                f"{file} has do_lower_case, which is not supported. Set it to false if "
                "tokenizer.json lower-cases texts itself, as ALBERT's does."
            )
    if limit is None:
        limit = _read(encoder / "tokenizer_config.json", _Keys, _Keys()).model_max_length
    positions = _read(encoder / "config.json", _Keys).max_position_embeddings
    return limit if limit is not None and limit < positions else None


def _read(file: Path, kind: type[_ContentT], default: _ContentT | None = None) -> _ContentT:
    """Return the content of a JSON file, or the default, if there is one, for a missing file."""
    if default is not None and not file.is_file():
        return default
    try:
        return TypeAdapter(kind).validate_json(read_small_file(file, _MAX_BYTES))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error}.") from error
    except ValueError as error:
        raise ConfigError(f"{file} is not valid: {describe_faults(error)}.") from error
