"""Checkpoints as Hugging Face directories: `config.json`, `model.safetensors`, the tokenizer.

All foreign names of weights are in `HF_NAMES`, which is read in both directions.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from albert_serve.config import AlbertConfig
from albert_serve.errors import ConfigError
from training.heads import AlbertForTasks, Task

# Our name <-> Hugging Face's, less `.weight` or `.bias`. {g} and {i} are the group and the layer
# within it; ours counts the distinct blocks, which are group * num_inner_layers + inner.
HF_NAMES: Final[dict[str, str]] = {
    "albert.embeddings.word": "albert.embeddings.word_embeddings",
    "albert.embeddings.position": "albert.embeddings.position_embeddings",
    "albert.embeddings.token_type": "albert.embeddings.token_type_embeddings",
    "albert.embeddings.norm": "albert.embeddings.LayerNorm",
    "albert.embeddings.project": "albert.encoder.embedding_hidden_mapping_in",
    "albert.encoder.attentions.{n}.query": "{layer}.attention.query",
    "albert.encoder.attentions.{n}.key": "{layer}.attention.key",
    "albert.encoder.attentions.{n}.value": "{layer}.attention.value",
    "albert.encoder.attentions.{n}.output": "{layer}.attention.dense",
    "albert.encoder.attentions.{n}.norm": "{layer}.attention.LayerNorm",
    "albert.encoder.ffns.{n}.up": "{layer}.ffn",
    "albert.encoder.ffns.{n}.down": "{layer}.ffn_output",
    "albert.encoder.ffns.{n}.norm": "{layer}.full_layer_layer_norm",
    "pooler.dense": "albert.pooler",
    "heads.fill-mask.dense": "predictions.dense",
    "heads.fill-mask.norm": "predictions.LayerNorm",
    "heads.fill-mask.decoder": "predictions",  # its weight is the word embeddings: only .bias
    "heads.sentence-order.output": "sop_classifier.classifier",
    "heads.text-classification.output": "classifier",
    "heads.multiple-choice.output": "classifier",
    "heads.question-answering.output": "qa_outputs",
}
_HF_LAYER: Final = "albert.encoder.albert_layer_groups.{g}.albert_layers.{i}"
_TIED: Final = ("predictions.decoder.weight", "predictions.decoder.bias")
_TOKENIZER_FILES: Final = ("tokenizer.json", "spiece.model")


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or whose parts contradict each other."""


def hf_name(ours: str, config: AlbertConfig) -> str:
    """Hugging Face's name of one of our parameters.

    Raises:
        KeyError: there is no parameter of that name.
    """
    stem, _, kind = ours.rpartition(".")
    number = re.search(r"\.(\d+)\.", stem)
    if number is None:
        return f"{HF_NAMES[stem]}.{kind}"
    group, inner = divmod(int(number[1]), config.num_inner_layers)
    layer = _HF_LAYER.format(g=group, i=inner)
    return f"{HF_NAMES[stem.replace(number[0], '.{n}.')]}.{kind}".format(layer=layer)


def parameters(model: AlbertForTasks) -> dict[str, nn.Parameter]:
    """Each distinct parameter once, by its Hugging Face name."""
    return {hf_name(name, model.config): tensor for name, tensor in model.named_parameters()}


def find_tasks(shapes: Mapping[str, tuple[int, ...]]) -> dict[Task, int]:
    """The tasks whose heads a checkpoint holds, and each head's outputs, from its weights' shapes.

    `shapes` are by Hugging Face name. A `classifier` of one output is read as a regression
    (`text-classification` of one label), as `transformers` does.
    """
    keys: dict[Task, str] = {
        "fill-mask": "predictions.bias",
        "sentence-order": "sop_classifier.classifier.bias",
        "text-classification": "classifier.bias",
        "question-answering": "qa_outputs.bias",
    }
    return {task: shapes[key][0] for task, key in keys.items() if key in shapes}


def save_checkpoint(
    model: AlbertForTasks,
    folder: Path,
    *,
    tokenizer_from: Path | None = None,
    extra_config: Mapping[str, Any] | None = None,
) -> None:
    """Write the model as a Hugging Face directory; each file appears whole or not at all.

    Args:
        tokenizer_from: a folder whose `tokenizer.json` and `spiece.model` are copied along.
        extra_config: further keys of `config.json`, such as `id2label`.

    Raises:
        CheckpointError: a weight is not finite.
        OSError: the folder cannot be written.
    """
    tensors = {name: tensor.detach().cpu() for name, tensor in parameters(model).items()}
    bad = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
    if bad:
        raise CheckpointError(f"not saved: {', '.join(bad[:3])} hold numbers that are not finite")
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": [_architecture(model.tasks)],
        **model.config.to_hf(),
        **(extra_config or {}),
    }
    write_atomically(folder / "config.json", (json.dumps(config, indent=2) + "\n").encode())
    partial = folder / "model.safetensors.partial"
    save_file({k: v.contiguous() for k, v in tensors.items()}, partial, {"format": "pt"})
    os.replace(partial, folder / "model.safetensors")
    if tokenizer_from is not None:
        _copy_tokenizer(tokenizer_from, folder)


def _copy_tokenizer(source: Path, folder: Path) -> None:
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            write_atomically(folder / name, (source / name).read_bytes())


def read_config(folder: Path) -> dict[str, Any]:
    """The keys of a checkpoint's `config.json`.

    Raises:
        CheckpointError: there is no such file, or it is not a JSON object.
    """
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} is not a JSON object")
    return config


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint by Hugging Face name, tied copies left out.

    Raises:
        CheckpointError: the file is missing, truncated, or not safetensors.
    """
    file = folder / "model.safetensors"
    try:
        tensors = load_file(file)
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}; is it complete?") from error
    return {name: tensor for name, tensor in tensors.items() if name not in _TIED}


def load_checkpoint(folder: Path, tasks: Mapping[Task, int] | None = None) -> AlbertForTasks:
    """The model of a checkpoint, ours or one that `transformers` wrote.

    Args:
        tasks: the heads to carry; those that the file lacks start fresh. By default the
            heads that the file holds.

    Raises:
        CheckpointError: a file cannot be read, a backbone weight is missing, or a shape
            contradicts the config.
    """
    try:
        config = AlbertConfig.from_hf(read_config(folder))
    except ConfigError as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from error
    weights = with_backbone_prefix(read_weights(folder))
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    model = AlbertForTasks(config, find_tasks(shapes) if tasks is None else tasks)
    load_weights(model, weights, source=str(folder))
    return model


def load_weights(model: AlbertForTasks, weights: Mapping[str, Tensor], *, source: str) -> None:
    """Copy weights into the model by name; heads that are not there keep their initialisation.

    Raises:
        CheckpointError: a backbone weight is missing, or a shape is another.
    """
    for name, parameter in parameters(model).items():
        given = weights.get(name)
        if given is None:
            if name.startswith(("albert.embeddings", "albert.encoder")):
                raise CheckpointError(f"{source} has no {name}, which its config.json asks for")
            continue
        if given.shape != parameter.shape:
            raise CheckpointError(
                f"{source}: {name} has shape {tuple(given.shape)}; "
                f"its config.json asks for {tuple(parameter.shape)}"
            )
        with torch.no_grad():
            parameter.copy_(given)


def with_backbone_prefix(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a bare `AlbertModel`, whose names lack `albert.`, under the full names."""
    bare = ("embeddings.", "encoder.", "pooler.")
    return {
        f"albert.{name}" if name.startswith(bare) else name: tensor
        for name, tensor in weights.items()
    }


def write_atomically(file: Path, content: bytes) -> None:
    """Write a file so that a reader, or a crash, sees the old content or the new, never a part."""
    partial = file.with_name(file.name + ".partial")
    with partial.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(partial, file)


def _architecture(tasks: Mapping[Task, int]) -> str:
    """The `transformers` class that reads most of these heads."""
    if "fill-mask" in tasks:
        return "AlbertForPreTraining" if "sentence-order" in tasks else "AlbertForMaskedLM"
    return {
        "text-classification": "AlbertForSequenceClassification",
        "question-answering": "AlbertForQuestionAnswering",
        "multiple-choice": "AlbertForMultipleChoice",
    }.get(next(iter(tasks), ""), "AlbertModel")
