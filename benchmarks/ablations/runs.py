"""The runs of an ablation: each is a pretraining in its own folder, then measured.

A run that was stopped is resumed, and a measured one is not repeated.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from albert_serve.files import write_atomically
from albert_serve.tokenizer import AlbertTokenizer
from benchmarks.ablations.findings import VariantResult
from benchmarks.ablations.measure import AblationTexts, measure_variant
from benchmarks.ablations.tables import Variant
from benchmarks.harness.process import BenchmarkError
from training import pretrain
from training.data.masking import NgramMasking, word_starts
from training.data.shards import Shards
from training.model.checkpoint import load_checkpoint

_FIGURES: Final = "figures.json"
_PREDICTIONS: Final = "predictions.npz"
_REPORTS_A_RUN: Final = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class AblationSetup:
    """Settings of all runs of an ablation; sizes are those of `training.pretrain`.

    Attributes:
        shards: folder of the corpus that is trained on.
        validation: folder of the held-out one.
        tokenizer: folder of the vocabulary that both were made with.
        sentence_weight: of the sentence task's loss.
        held_out_tokens: held-out text of each form that a model is measured on, and training
            text of each form that a probe is trained on.
    """

    shards: Path
    validation: Path
    tokenizer: Path
    hidden_size: int
    num_layers: int
    num_heads: int
    length: int
    batch_size: int
    sentence_weight: float
    held_out_tokens: int
    compiles: bool
    device: torch.device

    def settings(self) -> dict[str, Any]:
        """Return the settings that the figures depend on, for JSON.

        Raises:
            ShardError: a corpus cannot be read, or was made with another tokenizer.
        """
        settings = asdict(self)
        for name in ("tokenizer", "device", "compiles"):
            del settings[name]
        tokenizer = self.tokenizer / "tokenizer.json"
        for name in ("shards", "validation"):
            settings[name] = Shards.open(settings[name], tokenizer).fingerprint
        return settings

    def arguments(self, variant: Variant, folder: Path) -> list[str]:
        """Return the command line of `training.pretrain` for a variant."""
        return [
            *("--shards", str(self.shards), "--tokenizer", str(self.tokenizer)),
            *("--output", str(folder), "--preset", "small", "--recipe", "small"),
            *("--hidden-size", str(self.hidden_size), "--layers", str(self.num_layers)),
            *("--heads", str(self.num_heads), "--max-positions", str(self.length)),
            *("--length", str(self.length), "--batch-size", str(self.batch_size)),
            *("--sentence-weight", str(self.sentence_weight), "--steps", str(variant.num_steps)),
            *("--embedding-size", str(variant.embedding_size), "--sharing", variant.sharing),
            *("--sentence-task", variant.sentence_task, "--seed", str(variant.seed)),
            *("--device", str(self.device), "--keep", "1", "--save-every", "2m"),
            *("--report-every", str(_report_every(variant.num_steps))),
            "--compile" if self.compiles else "--no-compile",
        ]

    def texts(self) -> AblationTexts:
        """Return the texts that models are measured on."""
        tokenizer = AlbertTokenizer.from_file(self.tokenizer / "tokenizer.json")
        return AblationTexts(
            training=Shards.open(self.shards, self.tokenizer / "tokenizer.json"),
            held_out=Shards.open(self.validation, self.tokenizer / "tokenizer.json"),
            masking=NgramMasking(word_starts=word_starts(tokenizer)),
            length=self.length,
            num_tokens=self.held_out_tokens,
        )


def _report_every(num_steps: int) -> int:
    """Return the interval of reports, a divisor of the steps so that the last one is reported."""
    most = max(1, num_steps // _REPORTS_A_RUN)
    return max(size for size in range(1, most + 1) if num_steps % size == 0)


def read_result(folder: Path) -> VariantResult | None:
    """Return the result of a run; None if it is not finished.

    Raises:
        BenchmarkError: a file is damaged.
    """
    file = folder / _FIGURES
    if not file.is_file():
        return None
    try:
        figures = json.loads(file.read_bytes())
        with np.load(folder / _PREDICTIONS) as arrays:
            predictions = {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise BenchmarkError(f"{folder}: {error}; delete {file} to measure again") from error
    if not isinstance(figures, dict) or not predictions.keys() <= figures.keys():
        raise BenchmarkError(f"{file} holds no figures of a run; delete it to measure again")
    return VariantResult(figures=figures, predictions=predictions)


def make_runs(setup: AblationSetup, variants: Sequence[Variant], folder: Path) -> int:
    """Pretrain and measure the variants one after another, without those that are finished.

    Returns the exit status of the first run that failed or was stopped, or 0.

    Raises:
        TrainingError: a model cannot be measured.
    """
    for number, variant in enumerate(variants, 1):
        if (folder / variant.name / _FIGURES).is_file():
            continue
        print(f"run {number} of {len(variants)}: {variant.name}", flush=True)
        torch.compiler.reset()  # compiled code is the previous model's
        if status := _make_run(setup, variant, folder / variant.name):
            return status
    return 0


def _make_run(setup: AblationSetup, variant: Variant, folder: Path) -> int:
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
