"""Provenance of a checkpoint: its `training.json`, with one entry per stage of training."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import torch

from albert_serve.bundle.manifest import MANIFEST_FILE
from albert_serve.bundle.weights import TaskName
from albert_serve.files import write_atomically
from albert_serve.tasks.description import evaluated_quality

_FILE = "training.json"
_EVALUATION_FILE = "evaluation.json"


def record_stage(
    folder: Path,
    program: str,
    stage: Mapping[str, Any],
    *,
    earlier: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Write `training.json` into a checkpoint's folder: the earlier stages, then this one.

    Args:
        stage: settings, steps, tokens and data of this stage; `tasks`, whose heads it trained; and
            `before`, the figures of the checkpoint that it started from (`read_figures`).
        earlier: the stages of the checkpoint that this one started from (`read_stages`).
    """
    record = {"program": program, "torch": torch.__version__, **stage}
    content = json.dumps({"stages": [*earlier, record]}, indent=2) + "\n"
    write_atomically(folder / _FILE, content.encode())


def read_stages(folder: Path) -> list[dict[str, Any]]:
    """Return the stages that `record_stage` wrote, or that a bundle's manifest has of them.

    An empty list without either; a checkpoint of the Hub may have other files of these names.
    """
    record: Any = read_object(folder / _FILE)
    if not record:
        provenance = read_object(folder / MANIFEST_FILE).get("provenance")
        record = provenance.get("training") if isinstance(provenance, dict) else None
    stages = record.get("stages") if isinstance(record, dict) else None
    return stages if isinstance(stages, list) else []


def read_figures(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the quality of each task that a checkpoint was evaluated on, as in `TaskQuality`.

    It stands in `evaluation.json`, or in a bundle's manifest.
    """
    own = read_object(folder / _EVALUATION_FILE)
    evaluation = own or read_object(folder / MANIFEST_FILE).get("evaluation")
    evaluation = evaluation if isinstance(evaluation, dict) else {}
    figures = {task: evaluated_quality(evaluation, task) for task in get_args(TaskName)}
    return {task: figure.model_dump() for task, figure in figures.items() if figure is not None}


def read_object(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one if it holds none."""
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def file_names(files: Iterable[Path] | None) -> list[str]:
    """Return the names of data files without their folders."""
    # As text, also where the file system's encoding is ASCII, as with LC_ALL=C.
    return [os.fsencode(file.name).decode(errors="replace") for file in files or []]
