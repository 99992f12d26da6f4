"""Models with fewer positions, fewer or more layers, or shared weights repeated."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from torch import Tensor

from albert_serve.bundle.manifest import MANIFEST_FILE
from albert_serve.bundle.sentence_vectors import read_sentence_vectors
from albert_serve.config import AlbertConfig
from training.model.checkpoint import (
    UNSUPPORTED_KEY,
    CheckpointError,
    check_config,
    load_checkpoint,
    load_weights,
    read_config,
    save_checkpoint,
)
from training.model.heads import AlbertForTasks
from training.model.hf_names import parameters

# Files that depend on the number of layers: sizes, figures, and graphs with their manifest.
_OF_ALL_LAYERS: Final = ("config.json", "evaluation.json", MANIFEST_FILE)


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
    config = replace(model.config, max_positions=num_positions)
    cut = AlbertForTasks(config, model.tasks)
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
    grown = _with_other_layers(model, replace(model.config, num_layers=num_layers))
    old, new = model.albert.encoder, grown.albert.encoder
    for blocks, shallower in ((new.attentions, old.attentions), (new.ffns, old.ffns)):
        for place, block in enumerate(blocks):
            layer, inner = divmod(place, model.config.num_inner_layers)
            source = layer * len(shallower) // len(blocks) * model.config.num_inner_layers + inner
            block.load_state_dict(shallower[source].state_dict())
    return grown


def _with_other_layers(model: AlbertForTasks, config: AlbertConfig) -> AlbertForTasks:
    """Return a new model with the model's weights outside of its layers."""
    other = AlbertForTasks(config, model.tasks)
    rest = {k: v for k, v in model.state_dict().items() if not k.startswith("albert.encoder.")}
    other.load_state_dict(rest, strict=False)
    return other


@contextmanager
def with_layers(folder: Path, num_layers: int | None) -> Iterator[Path]:
    """Give a checkpoint with only its first layers, for `with`; None: the checkpoint itself.

    Its files are the same, except `config.json` and the figures of all layers.

    Raises:
        CheckpointError: it has fewer layers, or layers with weights of their own.
    """
    if num_layers is None:
        yield folder
        return
    hf = read_config(folder)
    config = check_config(hf, folder)
    if not config.is_fully_shared:
        raise CheckpointError(
            f"{folder} has layers with weights of their own; only a model whose layers share all "
            "weights can do with fewer"
        )
    if not 1 <= num_layers <= config.num_layers:
        raise CheckpointError(f"{num_layers} layers: {folder} has 1 to {config.num_layers}")
    with tempfile.TemporaryDirectory(prefix="albert-") as scratch:
        cut = Path(scratch)
        content = json.dumps({**hf, "num_hidden_layers": num_layers}, indent=2)
        (cut / "config.json").write_text(content + "\n", encoding="utf-8")
        for file in folder.iterdir():
            if file.name not in _OF_ALL_LAYERS:
                _link(file, cut / file.name)
        yield cut


def _link(source: Path, target: Path) -> None:
    """Make a symbolic link to a file or folder where the system can, else a copy."""
    try:
        target.symlink_to(source.resolve())
    except OSError:
        copy = shutil.copytree if source.is_dir() else shutil.copyfile
        copy(source, target)


def expand_for_hf(source: Path, folder: Path) -> None:
    """Write a checkpoint of any sharing for `transformers`, which can share whole layers only.

    Shared weights are repeated: the copy has one group per layer.

    Raises:
        CheckpointError: `source` cannot be read.
        OSError: the folder cannot be written.
    """
    model = load_checkpoint(source)
    config = replace(model.config, sharing="all", num_groups=model.config.num_layers)
    expanded = _with_other_layers(model, config)
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
