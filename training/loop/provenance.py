"""Provenance of a checkpoint: its `training.json`, with one entry per stage of training."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from albert_serve.files import write_atomically

_FILE = "training.json"


def record_stage(
    folder: Path, program: str, stage: Mapping[str, Any], *, earlier: Path | None = None
) -> None:
    """Write `training.json` into a checkpoint's folder: the stages of `earlier`, then this one.

    Args:
        folder: the checkpoint's folder.
        program: module that ran, such as `training.pretrain`.
        stage: settings, steps, tokens and data of this stage.
        earlier: the folder of the checkpoint that this one started from.
    """
    stages = read_stages(earlier) if earlier else []
    record = {"program": program, "torch": torch.__version__, **stage}
    content = json.dumps({"stages": [*stages, record]}, indent=2) + "\n"
    write_atomically(folder / _FILE, content.encode())


def read_stages(folder: Path) -> list[dict[str, Any]]:
    """Return the stages that `record_stage` wrote; an empty list without a `training.json` of it.

    A checkpoint of the Hub may have another file of that name.
    """
    file = folder / _FILE
    if not file.is_file():
        return []
    try:
        content = json.loads(file.read_bytes())
    except ValueError:
        return []
    stages = content.get("stages") if isinstance(content, dict) else None
    return stages if isinstance(stages, list) else []


def file_names(files: Iterable[Path] | None) -> list[str]:
    """Return the names of data files without their folders."""
    return [file.name for file in files or []]
