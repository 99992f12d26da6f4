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
        stage: settings, steps, tokens and data of this stage, `tasks` (whose heads it trained) and
            `before` (the metrics of the checkpoint that it started from, by `read_quality`).
        earlier: stages of the checkpoint that this stage started from (`read_stages`).
    """
    record = {"program": program, "torch": torch.__version__, **stage}
    content = json.dumps({"stages": [*earlier, record]}, indent=2) + "\n"
    write_atomically(folder / _FILE, content.encode())


def read_stages(folder: Path) -> list[dict[str, Any]]:
    """Return the stages that `record_stage` wrote, or their copy in a bundle's manifest.

    The list is empty without stages. Checkpoints on the Hub may have other files of these names.
    """
    record: Any = read_object(folder / _FILE)
    if not record:
        provenance = read_object(folder / MANIFEST_FILE).get("provenance")
        record = provenance.get("training") if isinstance(provenance, dict) else None
    stages = record.get("stages") if isinstance(record, dict) else None
    return stages if isinstance(stages, list) else []


def read_quality(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the `TaskQuality` of each task that a checkpoint was evaluated on.

    The evaluation is in `evaluation.json` or in a bundle's manifest.
    """
    evaluation: Any = read_object(folder / _EVALUATION_FILE)
    evaluation = evaluation or read_object(folder / MANIFEST_FILE).get("evaluation")
    evaluation = evaluation if isinstance(evaluation, dict) else {}
    by_task = {task: evaluated_quality(evaluation, task) for task in get_args(TaskName)}
    return {task: quality.model_dump() for task, quality in by_task.items() if quality is not None}


def read_object(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty object if the file does not contain one."""
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def file_names(files: Iterable[Path] | None) -> list[str]:
    """Return the names of data files without their folders."""
    # With LC_ALL=C the file system's encoding is ASCII, and other names are not valid text.
    return [os.fsencode(file.name).decode(errors="replace") for file in files or []]
