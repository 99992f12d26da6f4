"""Models with fewer positions, more layers, or shared weights repeated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from training.model.checkpoint import (
    CheckpointError,
    load_checkpoint,
    load_weights,
    parameters,
    read_config,
    save_checkpoint,
)
from training.model.heads import AlbertForTasks


def cut_positions(model: AlbertForTasks, num_positions: int) -> AlbertForTasks:
    """Return the model with only its first `num_positions` positions.

    Raises:
        CheckpointError: it has fewer positions.
    """
    if num_positions > model.config.max_positions:
        raise CheckpointError(
            f"{num_positions} positions cannot be cut from the model's {model.config.max_positions}"
        )
    weights: dict[str, Tensor] = dict(parameters(model))
    table = "albert.embeddings.position_embeddings.weight"
    weights[table] = weights[table][:num_positions]
    cut = AlbertForTasks(replace(model.config, max_positions=num_positions), model.tasks)
    load_weights(cut, weights, set(model.tasks))
    return cut


def grow_depth(model: AlbertForTasks, num_layers: int) -> AlbertForTasks:
    """Return the model with more layers and the same weights, for further training (appendix A.1).

    Unshared layers get the weights of the layer at their relative depth.

    Raises:
        CheckpointError: the model has more layers than that.
    """
    if num_layers < model.config.num_layers:
        raise CheckpointError(
            f"the checkpoint has {model.config.num_layers} layers; a model of {num_layers} "
            "cannot be grown from it"
        )
    grown = AlbertForTasks(replace(model.config, num_layers=num_layers), model.tasks)
    rest = {k: v for k, v in model.state_dict().items() if not k.startswith("albert.encoder.")}
    grown.load_state_dict(rest, strict=False)
    old, new = model.albert.encoder, grown.albert.encoder
    for blocks, shallower in ((new.attentions, old.attentions), (new.ffns, old.ffns)):
        for place, block in enumerate(blocks):
            layer, inner = divmod(place, model.config.num_inner_layers)
            source = layer * len(shallower) // len(blocks) * model.config.num_inner_layers + inner
            block.load_state_dict(shallower[source].state_dict())
    return grown


def expand_for_hf(source: Path, folder: Path) -> None:
    """Write a checkpoint of any sharing for `transformers`, which can share whole layers only.

    Shared weights are repeated: the copy has one group per layer.

    Raises:
        CheckpointError: `source` cannot be read.
        OSError: the folder cannot be written.
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
    extra = {k: v for k, v in read_config(source).items() if k not in config.to_hf()}
    save_checkpoint(expanded, folder, tokenizer_from=source, extra_config=extra)
