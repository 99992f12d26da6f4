"""The activation of a cross-encoder of `sentence-transformers`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from training.model.checkpoint import CheckpointError
from training.model.provenance import read_object

# The kind of task with the same activation, by the end of the class's path.
_PROBLEMS: Final = {"Sigmoid": "multi_label_classification", "Identity": "regression"}


def cross_encoder_keys(folder: Path, hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the key of `config.json` for a cross-encoder's activation; none for other models.

    Args:
        hf: content of the folder's `config.json`.

    Raises:
        CheckpointError: its activation is not computed here.
    """
    settings = read_object(folder / "config_sentence_transformers.json")
    older = hf.get("sentence_transformers")  # versions 4 and 5; before them a key of its own
    older = older if isinstance(older, dict) else {}
    activation = hf.get("sbert_ce_default_activation_function") or older.get("activation_fn")
    is_cross_encoder = settings.get("model_type") == "CrossEncoder" or activation is not None
    if not is_cross_encoder or len(hf.get("id2label") or ()) != 1:
        return {}
    activation = str(settings.get("activation_fn") or activation or "Sigmoid")
    problem = _PROBLEMS.get(activation.rpartition(".")[2])
    if problem is None:
        raise CheckpointError(
            f"{folder} is a cross-encoder with the activation {activation}; those that are "
            "computed here are Sigmoid and Identity. Save it with one of them"
        )
    return {"problem_type": problem}
