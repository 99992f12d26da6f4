"""A run's folder as `training.pretrain` lays it out; training/saving.py says how."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from scripts.bare_machine.manifest import BareMachineError
from scripts.bare_machine.pieces import Source, hash_file

CHECKPOINTS: Final = "checkpoints"
LINK: Final = "checkpoint"
HASHES: Final = "hashes.json"
STATE: Final = "state.pt"
RUN_FILE: Final = "run.json"
# The options that the run was begun with on the machine; ours.
OPTIONS_FILE: Final = "job.json"
# What is beside the checkpoints; TensorBoard's files stay where they are.
RUN_FILES: Final = (RUN_FILE, OPTIONS_FILE, "metrics.jsonl", "layers.jsonl")
_IDENTITY: Final = ("settings", "config", "corpus")
_STEP: Final = re.compile(r"step-(\d{8,})")


def newest_checkpoint(run: Path) -> Path | None:
    """The newest checkpoint of a run whose files are what was written; None where there is none.

    Nothing is changed, and none of torch is needed, in which it is unlike `training.saving`.
    """
    found = [path for path in (run / CHECKPOINTS).glob("step-*") if _STEP.fullmatch(path.name)]
    for checkpoint in sorted(found, key=step_of, reverse=True):
        if is_whole(checkpoint):
            return checkpoint
    return None


def step_of(checkpoint: Path) -> int:
    """The step that a checkpoint's folder is of."""
    return int(checkpoint.name.removeprefix("step-"))


def step_name(step: int) -> str:
    """The name of a step's folder."""
    return f"step-{step:08}"


def is_whole(checkpoint: Path) -> bool:
    """Whether the files have the hashes that were written with them."""
    try:
        hashes: Mapping[str, str] = json.loads((checkpoint / HASHES).read_bytes())
        return all(hash_file(checkpoint / name) == known for name, known in hashes.items())
    except (OSError, ValueError, AttributeError):
        return False


def is_same_run(one: Path, other: Path) -> bool:
    """Whether two folders hold the same run, however far each is.

    Raises:
        BareMachineError: the `run.json` of one cannot be read.
    """
    known = [_read_record(run / RUN_FILE) for run in (one, other)]
    return all(known[0].get(name) == known[1].get(name) for name in _IDENTITY)


def sources(run: Path, checkpoint: Path, prefix: str = "") -> tuple[Source, Source]:
    """A run with one checkpoint as what is cut: the model with all small files, and the state.

    Args:
        prefix: of the paths in the parcel.
    """
    files = {name: run / name for name in RUN_FILES if (run / name).is_file()}
    folder = f"{CHECKPOINTS}/{checkpoint.name}"
    files |= {f"{folder}/{file.name}": file for file in sorted(checkpoint.iterdir())}
    files = {prefix + path: file for path, file in files.items()}
    state = f"{prefix}{folder}/{STATE}"
    model = {path: file for path, file in files.items() if path != state}
    return (
        Source(name="model", codec="stored", files=model),
        Source(name="state", codec="stored", files={state: files[state]}),
    )


def _read_record(file: Path) -> dict[str, Any]:
    try:
        record = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise BareMachineError(f"{file} cannot be read: {error}") from error
    if not isinstance(record, dict):
        raise BareMachineError(f"{file} is not a JSON object")
    return record
