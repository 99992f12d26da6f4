"""Checkpoints as Hugging Face directories: `config.json`, `model.safetensors`, the tokenizer."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

from albert_serve.bundle.manifest import MANIFEST_FILE, WEIGHTS_FILE, read_manifest
from albert_serve.bundle.sentence_vectors import SentenceVectors, write_sentence_vectors
from albert_serve.bundle.weights import (
    CLASSIFICATION,
    HEAD_NAME,
    NUM_ORDERS,
    TOKENS,
    UNPOOLED_TASKS,
    expected_shapes,
    named_head,
    used_shape,
)
from albert_serve.config import AlbertConfig
from albert_serve.errors import BundleError, ConfigError
from albert_serve.files import (
    partial_path,
    put_in_place,
    read_small_file,
    write_atomically,
)
from albert_serve.tokenizer import AlbertTokenizer
from training.errors import TrainingError
from training.model.heads import MULTIPLE_CHOICE, AlbertForTasks, Task
from training.model.hf_names import HF_NAMES, hf_name, parameters, with_backbone_prefix

_NAMED_BIAS: Final = re.compile(rf"heads\.({HEAD_NAME})\.classifier\.bias").fullmatch
_ORDER_HEAD: Final = f"{HF_NAMES['heads.sentence-order.output']}."
_POOLER: Final = "albert.pooler.weight"
_POOLER_BIAS: Final = "albert.pooler.bias"
_NO_LOGIT: Final = -1e4  # gives a probability of 0, and is finite in fp16
_TIED: Final = ("predictions.decoder.weight", "predictions.decoder.bias")
# The `transformers` class that reads a task's head. Fill-mask with sentence order has its own.
_ARCHITECTURES: Final[dict[Task, str]] = {
    "fill-mask": "AlbertForMaskedLM",
    "text-classification": "AlbertForSequenceClassification",
    "question-answering": "AlbertForQuestionAnswering",
    "multiple-choice": "AlbertForMultipleChoice",
    "token-classification": "AlbertForTokenClassification",
}
# Heads of other architectures have other meanings under the same names.
_SUPPORTED_ARCHITECTURES: Final = frozenset(
    {"AlbertModel", "AlbertForPreTraining", *_ARCHITECTURES.values()}
)
# Key of `config.json` with which `transformers` rejects a model.
UNSUPPORTED_KEY: Final = "attn_implementation"
# Key of the number by which a classifier's logits are divided before the softmax or sigmoid.
TEMPERATURE_KEY: Final = "albert_temperature"
_MAX_CONFIG_BYTES: Final = 16 << 20
_TOKENIZER_FILES: Final = ("tokenizer.json", "spiece.model", "vocab.txt")


class CheckpointError(TrainingError):
    """A checkpoint that cannot be read or saved, or that is inconsistent."""


def find_tasks(
    shapes: Mapping[str, tuple[int, ...]], architectures: Sequence[str] = ()
) -> dict[Task, int]:
    """Return the number of outputs of each of a checkpoint's heads, by task.

    Args:
        shapes: shapes of the weights by Hugging Face name.
        architectures: `architectures` in `config.json`. They show whether the weights named
            `classifier` label tokens, rank choices (with one output) or classify texts.
    """
    _check_architectures(architectures)
    keys: dict[Task, str] = {
        "fill-mask": "predictions.bias",
        "sentence-order": "sop_classifier.classifier.bias",
        "text-classification": "classifier.bias",
        "question-answering": "qa_outputs.bias",
    }
    sizes = {task: shapes[key][0] for task, key in keys.items() if key in shapes}
    is_choice = _ARCHITECTURES["multiple-choice"] in architectures
    if is_choice and sizes.get("text-classification") == 1:
        sizes["multiple-choice"] = sizes.pop("text-classification")
    if _ARCHITECTURES[TOKENS] in architectures and "text-classification" in sizes:
        sizes[TOKENS] = sizes.pop("text-classification")
    named_sizes = {match[1]: shapes[name][0] for name in shapes if (match := _NAMED_BIAS(name))}
    return {**sizes, **{named_head(name): named_sizes[name] for name in sorted(named_sizes)}}


def _check_architectures(architectures: object) -> None:
    """Reject models whose heads have other meanings under the same names."""
    if not isinstance(architectures, list | tuple) or not all(
        isinstance(name, str) for name in architectures
    ):
        raise CheckpointError(
            f"architectures of config.json is {reprlib.repr(architectures)}, not a list of names."
        )
    unknown = [name for name in architectures if name not in _SUPPORTED_ARCHITECTURES]
    if unknown:
        raise CheckpointError(
            f"The architecture {', '.join(unknown)} in config.json is not supported. Use one of "
            f"{', '.join(sorted(_SUPPORTED_ARCHITECTURES))}."
        )


def save_checkpoint(
    model: AlbertForTasks,
    folder: Path,
    *,
    tokenizer_from: Path | None = None,
    extra_config: Mapping[str, Any] | None = None,
    sentence_vectors: SentenceVectors | None = None,
) -> None:
    """Write the model as a Hugging Face directory, each file atomically.

    Args:
        tokenizer_from: folder whose `tokenizer.json` and vocabulary are copied.
        extra_config: additional keys of `config.json`, such as `id2label`.
        sentence_vectors: settings of the embeddings, if the model is an embedding model.
    """
    tensors = {name: tensor.detach().cpu() for name, tensor in parameters(model).items()}
    not_finite = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
    if not_finite:
        raise CheckpointError(
            f"The model was not saved: {', '.join(not_finite[:3])} contain NaN or infinite numbers."
        )
    folder.mkdir(parents=True, exist_ok=True)
    # Without label names, `transformers` assumes two labels.
    num_labelled = model.tasks.get(CLASSIFICATION) or model.tasks.get(TOKENS, 0)
    names = [f"LABEL_{index}" for index in range(num_labelled)]
    extra = extra_config or {}
    config = {
        "architectures": _architectures(model.tasks),
        **model.config.to_hf(),
        **_keys_for_transformers(model.config),
        **(label_keys(names) if names and "id2label" not in extra else {}),
        **extra,
    }
    write_atomically(folder / "config.json", (json.dumps(config, indent=2) + "\n").encode())
    num_labels = len(config.get("id2label") or ()) or NUM_ORDERS
    padded = {name: _pad_order(name, tensor, num_labels) for name, tensor in tensors.items()}
    write_weights(padded, folder / "model.safetensors")
    if tokenizer_from is not None:
        write_tokenizer(read_tokenizer(tokenizer_from), model.config, folder)
    if sentence_vectors is not None:
        write_sentence_vectors(sentence_vectors, folder, hidden_size=model.config.hidden_size)


def _pad_order(name: str, tensor: Tensor, num_labels: int) -> Tensor:
    """Return a weight of the sentence order head with one output per label, for `transformers`.

    Outputs after the first two get a probability of 0. Other weights are returned unchanged.
    """
    num_missing = num_labels - NUM_ORDERS if name.startswith(_ORDER_HEAD) else 0
    value = _NO_LOGIT if name.endswith("bias") else 0.0
    padding = tensor.new_full((max(0, num_missing), *tensor.shape[1:]), value)
    return torch.cat([tensor, padding]) if len(padding) else tensor


def _keys_for_transformers(config: AlbertConfig) -> dict[str, Any]:
    """Return the keys with which `transformers` loads a model correctly, or rejects it.

    `transformers` supports groups of layers, but ignores `albert_sharing`.
    """
    if config.sharing == "all":
        return {}
    if config.sharing == "none":
        return {"num_hidden_groups": config.num_layers}
    return {UNSUPPORTED_KEY: f"none for albert_sharing={config.sharing}, see albert-serve convert"}


def write_weights(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Write tensors as safetensors, atomically."""
    partial = partial_path(file)
    try:
        save_file({k: v.contiguous() for k, v in tensors.items()}, partial, {"format": "pt"})
    except safetensors.SafetensorError as error:
        raise OSError(f"{file} cannot be written: {error}.") from error
    # safetensors lets only the owner read the file, but another user may serve it.
    partial.chmod(0o644)
    put_in_place(partial, file)


def label_keys(names: Sequence[str], *, multi_label: bool = False) -> dict[str, Any]:
    """Return the keys of `config.json` that name the labels of a classifier."""
    problem = "single_label_classification" if len(names) > 1 else "regression"
    return {
        "id2label": {str(index): name for index, name in enumerate(names)},
        "label2id": {name: index for index, name in enumerate(names)},
        "problem_type": "multi_label_classification" if multi_label else problem,
    }


def read_tokenizer(folder: Path) -> dict[str, bytes]:
    """Return the contents of a folder's `tokenizer.json` and vocabularies, by file name."""
    files = (folder / name for name in _TOKENIZER_FILES)
    return {file.name: file.read_bytes() for file in files if file.is_file()}


def write_tokenizer(files: Mapping[str, bytes], config: AlbertConfig, folder: Path) -> None:
    """Write the files that `read_tokenizer` returned, and `tokenizer_config.json`."""
    for name, content in files.items():
        write_atomically(folder / name, content)
    if "tokenizer.json" in files:
        write_tokenizer_config(config, folder)


def write_tokenizer_config(config: AlbertConfig, folder: Path) -> None:
    """Write the `tokenizer_config.json` of a folder with a `tokenizer.json`.

    The file names the tokenizer class that uses `tokenizer.json` unchanged: the classes for ALBERT
    and BERT rebuild the normaliser from settings. Without the file, `transformers` 5 omits the
    token types of pairs.
    """
    tokenizer = AlbertTokenizer.from_file(folder / "tokenizer.json")
    special_ids = {
        "pad_token": tokenizer.pad_id,
        "unk_token": tokenizer.unk_id,
        "cls_token": tokenizer.cls_id,
        "sep_token": tokenizer.sep_id,
        "mask_token": tokenizer.mask_id,
    }
    keys = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{
            name: tokenizer.token(index) for name, index in special_ids.items() if index is not None
        },
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
        "model_max_length": config.max_positions,
    }
    content = json.dumps(keys, indent=2) + "\n"
    write_atomically(folder / "tokenizer_config.json", content.encode())


def read_config(folder: Path) -> dict[str, Any]:
    """Read a checkpoint's `config.json`."""
    file = folder / "config.json"
    if (folder / "adapter_config.json").is_file() and not file.is_file():
        raise CheckpointError(
            f"{folder} is an adapter (LoRA, PEFT), not a model. Merge it into its model with peft "
            "(model.merge_and_unload().save_pretrained(FOLDER)), and use that folder."
        )
    _reject_lower_precision(folder)
    try:
        config = json.loads(read_small_file(file, _MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}.") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} is not a JSON object.")
    return config


def check_config(hf: Mapping[str, Any], source: object) -> AlbertConfig:
    """Return the architecture that the keys of `config.json` describe."""
    try:
        return AlbertConfig.from_hf(hf)
    except ConfigError as error:
        raise CheckpointError(f"config.json of {source}: {error}") from error


def _reject_lower_precision(folder: Path) -> None:
    """Raise a CheckpointError if the folder is a bundle of a lower precision than fp32."""
    if not (folder / MANIFEST_FILE).is_file():
        return
    try:
        precision = read_manifest(folder).precision
    except BundleError as error:
        raise CheckpointError(str(error)) from error
    if precision != "fp32":
        raise CheckpointError(
            f"{folder} is a bundle in {precision}, which cannot be trained or evaluated. Use the "
            "checkpoint that it was exported from, or an fp32 bundle."
        )


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read the tensors of a checkpoint by Hugging Face name, without tied copies."""
    with _opened_weights(folder) as stored:
        names = [name for name in stored.offset_keys() if name not in _TIED]
        tensors = {name: stored.get_tensor(name) for name in names}
        shapes = {name: used_shape(name, tuple(tensor.shape)) for name, tensor in tensors.items()}
        return {
            name: tensor if tensor.shape == shapes[name] else tensor[: shapes[name][0]]
            for name, tensor in tensors.items()
        }


def read_tasks(folder: Path) -> dict[Task, int]:
    """Read the number of outputs of each of a checkpoint's heads, without reading its weights."""
    return find_tasks(read_shapes(folder), read_config(folder).get("architectures") or ())


def read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Read the shapes of a checkpoint's weights by name."""
    with _opened_weights(folder) as stored:
        names = stored.offset_keys()
        shapes = {name: tuple(stored.get_slice(name).get_shape()) for name in names}
        return {name: used_shape(name, shape) for name, shape in shapes.items()}


@contextmanager
def _opened_weights(folder: Path) -> Iterator[Any]:
    file = folder / "model.safetensors"
    try:
        with safetensors.safe_open(file, "pt") as stored:
            yield stored
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}. Copy it again.") from error


def load_checkpoint(
    folder: Path,
    tasks: Mapping[Task, int] | None = None,
    *,
    new_heads: Collection[Task] = (),
) -> AlbertForTasks:
    """Load the model of a checkpoint in the standard form.

    Args:
        tasks: number of outputs of each of the model's heads, by task, or None for the
            checkpoint's heads. Heads that the checkpoint lacks, or has with another number, are
            newly initialised.
        new_heads: tasks of heads that are newly initialised in any case.
    """
    hf = read_config(folder)
    config = check_config(hf, folder)
    weights = with_backbone_prefix(read_weights(folder))
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    stored_heads = find_tasks(shapes, hf.get("architectures") or ())
    tasks = stored_heads if tasks is None else tasks
    loaded_heads = {
        task: size
        for task, size in tasks.items()
        if stored_heads.get(task) == size and task not in new_heads
    }
    _check_weights(weights, config, loaded_heads, folder)
    model = AlbertForTasks(config, tasks)
    load_weights(model, weights, loaded_heads.keys())
    return model


def _check_weights(
    weights: Mapping[str, Tensor], config: AlbertConfig, heads: Mapping[Task, int], folder: Path
) -> None:
    """Check the weights against the config, before a model of its sizes is built.

    Otherwise, layers that the config does not have would be silently omitted.
    """
    # A multiple-choice head's weights have the names of a classifier's weights.
    sizes = {CLASSIFICATION if head == MULTIPLE_CHOICE else head: n for head, n in heads.items()}
    expected = expected_shapes(config, sizes)
    if _POOLER in weights:
        expected[_POOLER] = (config.hidden_size, config.hidden_size)
        expected[_POOLER_BIAS] = (config.hidden_size,)
    for name, shape in expected.items():
        if name not in weights:
            raise CheckpointError(f"{folder} has no {name}, which its config.json requires.")
        if tuple(weights[name].shape) != shape:
            raise CheckpointError(
                f"{folder}: {name} has shape {tuple(weights[name].shape)}, but its config.json "
                f"requires {shape}."
            )
    stored = {name for name in weights if name.startswith("albert.encoder.")}
    if unused := sorted(stored - expected.keys()):
        raise CheckpointError(f"{folder} has {unused[0]}, which its config.json does not describe.")
    not_finite = [name for name in expected if not weights[name].isfinite().all()]
    if not_finite:
        raise CheckpointError(
            f"{folder / WEIGHTS_FILE}: {not_finite[0]} contains NaN or infinite numbers. Save the "
            "checkpoint again."
        )


def load_weights(model: AlbertForTasks, weights: Mapping[str, Tensor], heads: Set[Task]) -> None:
    """Copy the weights of the backbone, these heads and, if it is stored, the pooler."""
    prefixes = ["albert.", *(f"heads.{task}." for task in heads)]
    has_pooler = bool(heads - set(UNPOOLED_TASKS)) or _POOLER in weights
    prefixes += ["pooler."] if has_pooler else []
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith(tuple(prefixes)):
                parameter.copy_(weights[hf_name(name, model.config)])


def _architectures(tasks: Mapping[Task, int]) -> list[str]:
    """Return the `transformers` classes that read these heads."""
    names = [name for task, name in _ARCHITECTURES.items() if task in tasks]
    if {"fill-mask", "sentence-order"} <= tasks.keys():
        names[0] = "AlbertForPreTraining"
    return names or ["AlbertModel"]
