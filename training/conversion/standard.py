"""The standard form of a checkpoint: the Hugging Face directory that the rest of the code reads.

It has `config.json`, the weights as fp32 in one `model.safetensors` by today's names, and, if
there is a vocabulary, `tokenizer.json` with the ids of SentencePiece or WordPiece. An embedding
model also has the files of `sentence-transformers`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from albert_serve.bundle.manifest import TOKENIZER_FILE, WEIGHTS_FILE
from albert_serve.bundle.sentence_vectors import (
    encoder_folder,
    read_sentence_vectors,
    write_sentence_vectors,
)
from albert_serve.bundle.weights import read_header
from albert_serve.config import AlbertConfig
from albert_serve.files import write_atomically
from training.conversion.cross_encoder import cross_encoder_keys
from training.conversion.tensorflow import (
    CONFIG_FILE,
    VOCABULARY_FILES,
    load_tensorflow_weights,
    read_tensorflow_config,
)
from training.conversion.token_types import drop_types, types_agree
from training.conversion.weight_files import find_weights, is_current, load_weights
from training.model.checkpoint import (
    check_config,
    load_checkpoint,
    read_config,
    write_tokenizer_config,
    write_weights,
)
from training.model.resizing import expand_for_hf
from training.vocabulary.settings import read_settings
from training.vocabulary.spiece import build_tokenizer
from training.vocabulary.wordpiece import build_wordpiece

_SPIECE_FILE: Final = "spiece.model"
_WORDPIECE_FILE: Final = "vocab.txt"
# Other files of a checkpoint, which are copied unchanged.
_COPIED: Final = (TOKENIZER_FILE, _SPIECE_FILE, _WORDPIECE_FILE, "tokenizer_config.json",
                "training.json", "evaluation.json")  # fmt: skip


def is_standard(folder: Path) -> bool:
    """Whether a checkpoint is in the standard form."""
    read_sentence_vectors(folder)  # raises here, before hours of training
    if encoder_folder(folder) != folder:
        return False
    if not (folder / "config.json").is_file() and (folder / CONFIG_FILE).is_file():
        return False
    hf = read_config(folder)
    check_config(hf, folder)
    if not cross_encoder_keys(folder, hf).items() <= hf.items():
        return False
    vocabularies = (_SPIECE_FILE, _WORDPIECE_FILE, *VOCABULARY_FILES)
    has_vocabulary = any((folder / name).is_file() for name in vocabularies)
    if has_vocabulary and not (folder / TOKENIZER_FILE).is_file():
        return False
    if not types_agree(folder):
        return False
    weights = find_weights(folder)
    return weights is not None and weights.name == WEIGHTS_FILE and _are_standard(weights)


def _are_standard(weights: Path) -> bool:
    stored = read_header(weights)
    return all(is_current(name) and tensor.dtype == "F32" for name, tensor in stored.items())


def write_standard(source: Path, folder: Path) -> None:
    """Write a checkpoint of any format into a new folder, in the standard form."""
    folder.mkdir(parents=True)
    vectors, source = read_sentence_vectors(source), encoder_folder(source)
    if (source / "config.json").is_file():
        config, weights = read_config(source), load_weights(source)
        config = {k: v for k, v in config.items() if k != "torch_dtype"} | {"dtype": "float32"}
        config |= cross_encoder_keys(source, config)
    else:
        config, weights = read_tensorflow_config(source), load_tensorflow_weights(source)
    _write_config(config, folder)
    write_weights(weights, folder / WEIGHTS_FILE)
    for name in _COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    sizes = check_config(config, source)
    _add_tokenizer(source, folder, sizes)
    drop_types(source, folder)
    if vectors is not None:
        write_sentence_vectors(vectors, folder, hidden_size=sizes.hidden_size)


def _add_tokenizer(source: Path, folder: Path, config: AlbertConfig) -> None:
    """Add the missing files of the tokenizer, if there is a vocabulary."""
    for original, name in VOCABULARY_FILES.items():
        if (source / original).is_file() and not (folder / name).is_file():
            shutil.copyfile(source / original, folder / name)
    has_tokenizer = (folder / TOKENIZER_FILE).is_file()
    if not has_tokenizer and (tokenizer := _build_tokenizer(folder)) is not None:
        write_atomically(folder / TOKENIZER_FILE, tokenizer.to_str().encode())
        write_tokenizer_config(config, folder)
    elif has_tokenizer and not (folder / "tokenizer_config.json").is_file():
        write_tokenizer_config(config, folder)


def _build_tokenizer(folder: Path) -> Tokenizer | None:
    """Build the tokenizer of a folder's vocabulary; None if there is none."""
    settings = read_settings(folder)
    spiece, wordpiece = folder / _SPIECE_FILE, folder / _WORDPIECE_FILE
    is_bert = (settings.tokenizer_class or "").startswith("Bert")
    if wordpiece.is_file() and (is_bert or not spiece.is_file()):
        return build_wordpiece(wordpiece, settings)
    return build_tokenizer(spiece, settings) if spiece.is_file() else None


def write_for_transformers(source: Path, folder: Path) -> None:
    """Write a checkpoint in standard form as one that `transformers` reads, into an empty folder.

    Each layer gets a copy of the shared modules that `transformers` cannot share.
    """
    hf = read_config(source)
    sizes = check_config(hf, source)
    if sizes.sharing != "all":
        expand_for_hf(source, folder)
        return
    load_checkpoint(source)  # refuses weights that the config contradicts
    folder.mkdir(parents=True, exist_ok=True)
    _write_config(hf, folder)
    for name in (WEIGHTS_FILE, *_COPIED):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    vectors = read_sentence_vectors(source)
    if vectors is not None:
        write_sentence_vectors(vectors, folder, hidden_size=sizes.hidden_size)


def _write_config(config: Mapping[str, Any], folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
