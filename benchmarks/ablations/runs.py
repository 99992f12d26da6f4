"""The runs of an ablation: each is a pretraining in its own folder, then measured.

A run that was stopped is resumed, and a measured one is not repeated.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

import numpy as np
import torch

from albert_serve.files import write_atomically
from benchmarks.ablations.findings import Result
from benchmarks.ablations.measure import measure_variant
from benchmarks.ablations.setup import Setup
from benchmarks.ablations.tables import Variant
from training import pretrain
from training.errors import TrainingError
from training.model.checkpoint import load_checkpoint

_FIGURES: Final = "figures.json"
_PREDICTIONS: Final = "predictions.npz"


class AblationError(TrainingError):
    """An ablation that cannot start or go on."""


def is_done(folder: Path) -> bool:
    """Whether a run is trained and measured."""
    return (folder / _FIGURES).is_file()


def read_result(folder: Path) -> Result | None:
    """Return the result of a run; None if it is not finished.

    Raises:
        AblationError: a file is damaged.
    """
    if not is_done(folder):
        return None
    file = folder / _FIGURES
    try:
        figures = json.loads(file.read_bytes())
        with np.load(folder / _PREDICTIONS) as arrays:
            predictions = {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise AblationError(f"{folder}: {error}; delete {file} to measure again") from error
    if not isinstance(figures, dict) or not predictions.keys() <= figures.keys():
        raise AblationError(f"{file} holds no figures of a run; delete it to measure again")
    return Result(figures=figures, predictions=predictions)


def make_runs(setup: Setup, variants: Sequence[Variant], folder: Path) -> int:
    """Pretrain and measure the variants one after another, without those that are finished.

    Returns the exit status of the first run that failed or was stopped, or 0.

    Raises:
        TrainingError: a model cannot be measured.
    """
    for number, variant in enumerate(variants, 1):
        if is_done(folder / variant.name):
            continue
        print(f"run {number} of {len(variants)}: {variant.name}", flush=True)
        torch.compiler.reset()  # compiled code is the previous model's
        if status := _make_run(setup, variant, folder / variant.name):
            return status
    return 0


def _make_run(setup: Setup, variant: Variant, folder: Path) -> int:
    """Pretrain one model or resume its run, and measure it; return the exit status."""
    status = pretrain.main(setup.arguments(variant, folder))
    if status:
        return status
    model = load_checkpoint(folder / "checkpoint").to(setup.device)
    measured = measure_variant(model, variant.sentence_task, setup.texts(), setup.device)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    record = {
        "variant": asdict(variant),
        "tokens": last["tokens"],
        "training_s": last["elapsed_s"],
        **measured.figures(),
    }
    predictions = io.BytesIO()
    np.savez_compressed(predictions, **measured.predictions)  # type: ignore[arg-type]
    write_atomically(folder / _PREDICTIONS, predictions.getvalue())
    write_atomically(folder / _FIGURES, (json.dumps(record, indent=2) + "\n").encode())
    return 0
