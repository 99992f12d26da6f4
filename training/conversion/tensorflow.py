"""Google's ALBERT checkpoints: `albert_config.json`, TensorFlow's weights, `30k-clean.model`.

Only these checkpoints have the sentence order head. Reading them does not need TensorFlow.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from albert_serve.config import AlbertConfig
from albert_serve.errors import ConfigError
from training.conversion.tensor_bundle import TensorBundle
from training.model.checkpoint import CheckpointError
from training.model.hf_names import HF_LAYER

CONFIG_FILE: Final = "albert_config.json"
# File name of the vocabulary in our checkpoints, by its name in Google's archives.
VOCABULARY_FILES: Final = {"30k-clean.model": "spiece.model", "vocab_chinese.txt": "vocab.txt"}
_TF_LAYER: Final = "bert/encoder/transformer/group_{g}/inner_group_{i}"
# Hugging Face's name of a weight, by TensorFlow's name.
_NAMES: Final[dict[str, str]] = {
    "bert/embeddings/word_embeddings": "albert.embeddings.word_embeddings.weight",
    "bert/embeddings/position_embeddings": "albert.embeddings.position_embeddings.weight",
    "bert/embeddings/token_type_embeddings": "albert.embeddings.token_type_embeddings.weight",
    "cls/predictions/output_bias": "predictions.bias",
    "cls/seq_relationship/output_weights": "sop_classifier.classifier.weight",
    "cls/seq_relationship/output_bias": "sop_classifier.classifier.bias",
}
# Hugging Face's name of a module, by TensorFlow's name. {g}: group, {i}: layer within the group.
_MODULES: Final[dict[str, str]] = {
    "bert/embeddings/LayerNorm": "albert.embeddings.LayerNorm",
    "bert/encoder/embedding_hidden_mapping_in": "albert.encoder.embedding_hidden_mapping_in",
    f"{_TF_LAYER}/attention_1/self/query": f"{HF_LAYER}.attention.query",
    f"{_TF_LAYER}/attention_1/self/key": f"{HF_LAYER}.attention.key",
    f"{_TF_LAYER}/attention_1/self/value": f"{HF_LAYER}.attention.value",
    f"{_TF_LAYER}/attention_1/output/dense": f"{HF_LAYER}.attention.dense",
    f"{_TF_LAYER}/LayerNorm": f"{HF_LAYER}.attention.LayerNorm",
    f"{_TF_LAYER}/ffn_1/intermediate/dense": f"{HF_LAYER}.ffn",
    f"{_TF_LAYER}/ffn_1/intermediate/output/dense": f"{HF_LAYER}.ffn_output",
    f"{_TF_LAYER}/LayerNorm_1": f"{HF_LAYER}.full_layer_layer_norm",
    "bert/pooler/dense": "albert.pooler",
    "cls/predictions/transform/dense": "predictions.dense",
    "cls/predictions/transform/LayerNorm": "predictions.LayerNorm",
}
# Last part of a module weight's name, by TensorFlow's. Kernels are [in, out] in TensorFlow.
_KINDS: Final[dict[str, str]] = {
    "kernel": "weight", "bias": "bias", "gamma": "weight", "beta": "bias",
}  # fmt: skip
# Variables that only training uses.
_TRAINING: Final = re.compile(r"global_step|.*/(adam_m|adam_v|AdamWeightDecayOptimizer(_1)?)")


def read_tensorflow_config(folder: Path) -> dict[str, Any]:
    """Return the settings in `albert_config.json` under Hugging Face's `config.json` keys."""
    file = folder / CONFIG_FILE
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} is not a JSON object.")
    if content.get("hidden_act") == "gelu":
        content["hidden_act"] = "gelu_new"  # Google's `gelu` is the approximation by tanh
    content.pop("model_type", None)
    try:
        config = AlbertConfig.from_hf(content)
    except ConfigError as error:
        raise CheckpointError(f"{file}: {error}") from error
    return {"architectures": ["AlbertForPreTraining"], **config.to_hf()}


def load_tensorflow_weights(folder: Path) -> dict[str, Tensor]:
    """Read the weights of the folder's checkpoint as fp32, by Hugging Face's names."""
    indices = sorted(folder.glob("*.index"))
    if len(indices) != 1:
        names = ", ".join(file.name for file in indices) or "none"
        raise CheckpointError(
            f"{folder} has the indices {names}, not exactly one. Use a folder with one TensorFlow "
            "checkpoint, such as model.ckpt-best.index and model.ckpt-best.data-00000-of-00001."
        )
    bundle = TensorBundle(indices[0])
    renamed = {name: _hf_name(name) for name in bundle.entries if not _TRAINING.fullmatch(name)}
    unknown = [name for name, hf_name in renamed.items() if hf_name is None]
    if unknown:
        raise CheckpointError(
            f"{indices[0]} contains {unknown[0]}, which is not a variable of ALBERT. "
            "Use a checkpoint of the original pretraining."
        )
    return {
        hf_name: _to_tensor(bundle.read(name), is_kernel=name.endswith("/kernel"))
        for name, hf_name in renamed.items()
        if hf_name is not None
    }


def _hf_name(name: str) -> str | None:
    """Return Hugging Face's name of a variable, or None if ALBERT has no such variable."""
    if name in _NAMES:
        return _NAMES[name]
    stem, _, kind = name.rpartition("/")
    layer = re.search(r"/group_(\d+)/inner_group_(\d+)/", stem)
    if layer:
        stem = stem.replace(layer[0], "/group_{g}/inner_group_{i}/")
    if stem not in _MODULES or kind not in _KINDS:
        return None
    module = _MODULES[stem]
    return f"{module.format(g=layer[1], i=layer[2]) if layer else module}.{_KINDS[kind]}"


def _to_tensor(array: np.ndarray[Any, Any], *, is_kernel: bool) -> Tensor:
    fp32 = np.ascontiguousarray(array.T if is_kernel else array, np.float32)
    return torch.from_numpy(fp32 if fp32.flags.writeable else fp32.copy())
