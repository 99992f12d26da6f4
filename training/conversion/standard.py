"""The standard form of a checkpoint: the Hugging Face directory that all other code reads.

It contains `config.json` and one `model.safetensors` with fp32 weights under their current names.
If there is a vocabulary, it contains `tokenizer.json` with the ids of SentencePiece or WordPiece.
An embedding model also has the files of `sentence-transformers`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer, processors

from albert_serve.bundle.manifest import TOKENIZER_FILE, WEIGHTS_FILE
from albert_serve.bundle.sentence_vectors import (
    encoder_folder,
    read_sentence_vectors,
    write_sentence_vectors,
)
from albert_serve.bundle.weights import read_header
from albert_serve.config import AlbertConfig
from albert_serve.files import write_atomically
from albert_serve.tokenizer import AlbertTokenizer, pair_type
from training.conversion.tensorflow import (
    CONFIG_FILE,
    VOCABULARY_FILES,
    load_tensorflow_weights,
    read_tensorflow_config,
)
from training.conversion.weight_files import find_weights, is_current, load_weights
from training.model.checkpoint import (
    UNSUPPORTED_KEY,
    CheckpointError,
    check_config,
    load_checkpoint,
    read_config,
    save_checkpoint,
    write_tokenizer_config,
    write_weights,
)
from training.model.heads import AlbertForTasks
from training.model.provenance import read_object
from training.vocabulary.settings import read_settings
from training.vocabulary.spiece import build_tokenizer
from training.vocabulary.wordpiece import build_wordpiece

_SPIECE_FILE: Final = "spiece.model"
_WORDPIECE_FILE: Final = "vocab.txt"
# Other files of a checkpoint, which are copied unchanged.
_COPIED_FILES: Final = (TOKENIZER_FILE, _SPIECE_FILE, _WORDPIECE_FILE, "tokenizer_config.json",
                "training.json", "evaluation.json")  # fmt: skip
# Problem type of each activation, by the last part of the activation's class path.
_PROBLEM_TYPES: Final = {"Sigmoid": "multi_label_classification", "Identity": "regression"}
# Tokenizer classes that omit token types since `transformers` 5.
_CLASSES_WITHOUT_TYPES: Final = ("Albert", "PreTrainedTokenizer", "TokenizersBackend")


def is_standard(folder: Path) -> bool:
    """Return whether a checkpoint is in the standard form."""
    read_sentence_vectors(folder)  # raises its errors now, not after hours of training
    if encoder_folder(folder) != folder:
        return False
    if not (folder / "config.json").is_file() and (folder / CONFIG_FILE).is_file():
        return False
    hf = read_config(folder)
    check_config(hf, folder)
    if not _cross_encoder_keys(folder, hf).items() <= hf.items():
        return False
    vocabularies = (_SPIECE_FILE, _WORDPIECE_FILE, *VOCABULARY_FILES)
    has_vocabulary = any((folder / name).is_file() for name in vocabularies)
    if has_vocabulary and not (folder / TOKENIZER_FILE).is_file():
        return False
    if not _types_agree(folder):
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
        config |= _cross_encoder_keys(source, config)
    else:
        config, weights = read_tensorflow_config(source), load_tensorflow_weights(source)
    _write_config(config, folder)
    write_weights(weights, folder / WEIGHTS_FILE)
    for name in _COPIED_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    sizes = check_config(config, source)
    _add_tokenizer(source, folder, sizes)
    _drop_types(source, folder)
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
    """Build the tokenizer of a folder's vocabulary; return None without a vocabulary."""
    settings = read_settings(folder)
    spiece, wordpiece = folder / _SPIECE_FILE, folder / _WORDPIECE_FILE
    is_bert = (settings.tokenizer_class or "").startswith("Bert")
    if wordpiece.is_file() and (is_bert or not spiece.is_file()):
        return build_wordpiece(wordpiece, settings)
    return build_tokenizer(spiece, settings) if spiece.is_file() else None


def write_for_transformers(source: Path, folder: Path) -> None:
    """Write a standard checkpoint into an empty folder so that `transformers` can read it.

    Modules that `transformers` cannot share are repeated in each layer.
    """
    hf = read_config(source)
    sizes = check_config(hf, source)
    if sizes.sharing != "all":
        expand_for_hf(source, folder)
        return
    load_checkpoint(source)  # rejects weights that contradict the config
    folder.mkdir(parents=True, exist_ok=True)
    _write_config(hf, folder)
    for name in (WEIGHTS_FILE, *_COPIED_FILES):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    vectors = read_sentence_vectors(source)
    if vectors is not None:
        write_sentence_vectors(vectors, folder, hidden_size=sizes.hidden_size)


def _write_config(config: Mapping[str, Any], folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _cross_encoder_keys(folder: Path, hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `config.json` key of a cross-encoder's activation, if the model is one."""
    settings = read_object(folder / "config_sentence_transformers.json")
    # sentence-transformers 4 and 5 write this key. Older versions write the flat key.
    nested = hf.get("sentence_transformers")
    nested = nested if isinstance(nested, dict) else {}
    activation = hf.get("sbert_ce_default_activation_function") or nested.get("activation_fn")
    is_cross_encoder = settings.get("model_type") == "CrossEncoder" or activation is not None
    if not is_cross_encoder or len(hf.get("id2label") or ()) != 1:
        return {}
    activation = str(settings.get("activation_fn") or activation or "Sigmoid")
    problem = _PROBLEM_TYPES.get(activation.rpartition(".")[2])
    if problem is None:
        raise CheckpointError(
            f"{folder} is a cross-encoder with the activation {activation}, which is not "
            "supported. Save it with Sigmoid or Identity."
        )
    return {"problem_type": problem}


def _types_agree(folder: Path) -> bool:
    """Return whether `tokenizer.json` gives pairs the token types of `tokenizer_config.json`."""
    file = folder / TOKENIZER_FILE
    if not _omits_types(folder) or not file.is_file():
        return True
    return pair_type(AlbertTokenizer.read(file)) == 0


def _drop_types(source: Path, folder: Path) -> None:
    """Set type 0 for both texts of a pair in `tokenizer.json`, if the source's settings do."""
    file = folder / TOKENIZER_FILE
    if not _omits_types(source) or not file.is_file():
        return
    tokenizer = AlbertTokenizer.read(file)
    albert = AlbertTokenizer(AlbertTokenizer.read(file))
    cls, sep = albert.token(albert.cls_id), albert.token(albert.sep_id)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[cls, "$A", sep],
        pair=[cls, "$A", sep, "$B:0", f"{sep}:0"],
        special_tokens=[(cls, albert.cls_id), (sep, albert.sep_id)],
    )
    write_atomically(file, tokenizer.to_str().encode())


def _omits_types(folder: Path) -> bool:
    file = folder / "tokenizer_config.json"
    settings: dict[str, Any] = read_object(file)
    names = settings.get("model_input_names")
    if names is not None or not file.is_file():
        return isinstance(names, list) and "token_type_ids" not in names
    version = str(read_object(folder / "config.json").get("transformers_version", ""))
    major = version.partition(".")[0]
    name = str(settings.get("tokenizer_class") or "Albert")
    return major.isdigit() and int(major) >= 5 and name.startswith(_CLASSES_WITHOUT_TYPES)


def expand_for_hf(source: Path, folder: Path) -> None:
    """Write a checkpoint for `transformers`, which can share only complete layers.

    Shared weights are repeated: the copy has one group per layer.
    """
    model = load_checkpoint(source)
    config = replace(model.config, sharing="all", num_groups=model.config.num_layers)
    expanded = AlbertForTasks(config, model.tasks)
    weights = model.state_dict().items()
    outside_encoder = {k: v for k, v in weights if not k.startswith("albert.encoder.")}
    expanded.load_state_dict(outside_encoder, strict=False)
    shared, repeated = model.albert.encoder, expanded.albert.encoder
    for layer, (attention, ffn) in enumerate(model.config.layer_plan):
        repeated.attentions[layer].load_state_dict(shared.attentions[attention].state_dict())
        repeated.ffns[layer].load_state_dict(shared.ffns[ffn].state_dict())
    written_keys = {*config.to_hf(), UNSUPPORTED_KEY}
    extra = {k: v for k, v in read_config(source).items() if k not in written_keys}
    save_checkpoint(
        expanded,
        folder,
        tokenizer_from=source,
        extra_config=extra,
        sentence_vectors=read_sentence_vectors(source),
    )
