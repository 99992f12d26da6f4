"""Models with fewer positions, or with shared weights repeated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from albert_serve.bundle.sentence_vectors import read_sentence_vectors
from training.model.checkpoint import (
    UNSUPPORTED_KEY,
    CheckpointError,
    load_checkpoint,
    load_weights,
    read_config,
    save_checkpoint,
)
from training.model.heads import AlbertForTasks
from training.model.hf_names import parameters


def cut_positions(model: AlbertForTasks, num_positions: int) -> AlbertForTasks:
    """Return the model with only its first `num_positions` positions."""
    if num_positions > model.config.max_positions:
        raise CheckpointError(
            f"{num_positions} positions cannot be cut from the model's {model.config.max_positions}"
        )
    weights: dict[str, Tensor] = dict(parameters(model))
    table = "albert.embeddings.position_embeddings.weight"
    weights[table] = weights[table][:num_positions]
    config = replace(model.config, max_positions=num_positions)
    cut = AlbertForTasks(config, model.tasks)
    load_weights(cut, weights, set(model.tasks))
    return cut


def expand_for_hf(source: Path, folder: Path) -> None:
    """Write a checkpoint of any sharing for `transformers`, which can share whole layers only.

    Shared weights are repeated: the copy has one group per layer.
    """
    model = load_checkpoint(source)
    config = replace(model.config, sharing="all", num_groups=model.config.num_layers)
    expanded = AlbertForTasks(config, model.tasks)
    rest = {k: v for k, v in model.state_dict().items() if not k.startswith("albert.encoder.")}
    expanded.load_state_dict(rest, strict=False)
    shared, repeated = model.albert.encoder, expanded.albert.encoder
    for place, (attention, ffn) in enumerate(model.config.layer_plan):
        repeated.attentions[place].load_state_dict(shared.attentions[attention].state_dict())
        repeated.ffns[place].load_state_dict(shared.ffns[ffn].state_dict())
    known = {*config.to_hf(), UNSUPPORTED_KEY}
    extra = {k: v for k, v in read_config(source).items() if k not in known}
    save_checkpoint(
        expanded,
        folder,
        tokenizer_from=source,
        extra_config=extra,
        sentence_vectors=read_sentence_vectors(source),
    )
