"""Names of weights in this package and in `transformers`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from torch import Tensor, nn

from albert_serve.bundle.weights import output_layer
from albert_serve.config import AlbertConfig
from training.model.heads import AlbertForTasks, is_named

# Hugging Face's name of a weight, by our name, both without `.weight` or `.bias`. {g} and {i} are
# the group and the layer within it. {n} is a distinct block's index, g * num_inner_layers + i.
# `output_layer` names additional classifiers.
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
    "heads.fill-mask.decoder": "predictions",  # only its bias, because its weight is tied
    "heads.sentence-order.output": "sop_classifier.classifier",
    "heads.text-classification.output": "classifier",
    "heads.multiple-choice.output": "classifier",
    "heads.token-classification.output": "classifier",
    "heads.question-answering.output": "qa_outputs",
}
HF_LAYER: Final = "albert.encoder.albert_layer_groups.{g}.albert_layers.{i}"


def hf_name(name: str, config: AlbertConfig) -> str:
    """Return the Hugging Face name of a parameter."""
    stem, _, kind = name.rpartition(".")
    head = stem.removeprefix("heads.").removesuffix(".output")
    if is_named(head):
        return f"{output_layer(head)}.{kind}"
    number = re.search(r"\.(\d+)(?=\.|$)", stem)
    if number is None:
        return f"{HF_NAMES[stem]}.{kind}"
    group, inner = divmod(int(number[1]), config.num_inner_layers)
    layer = HF_LAYER.format(g=group, i=inner)
    pattern = f"{stem[: number.start(1)]}{{n}}{stem[number.end(1) :]}"
    return f"{HF_NAMES[pattern]}.{kind}".format(layer=layer, n=number[1])


def parameters(model: AlbertForTasks) -> dict[str, nn.Parameter]:
    """Return each distinct parameter once, by its Hugging Face name."""
    return {hf_name(name, model.config): tensor for name, tensor in model.named_parameters()}


def with_backbone_prefix(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add the prefix `albert.`, which the weights of a bare `AlbertModel` do not have."""
    bare = ("embeddings.", "encoder.", "pooler.")
    return {
        f"albert.{name}" if name.startswith(bare) else name: tensor
        for name, tensor in weights.items()
    }
