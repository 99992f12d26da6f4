"""One run of an ablation: how it is pretrained, how it is measured, and what is kept of it."""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from albert_serve.files import write_atomically
from albert_serve.tokenizer import AlbertTokenizer
from benchmarks.ablations.findings import Result
from benchmarks.ablations.measure import Texts, measure_variant
from benchmarks.ablations.tables import Variant
from training import pretrain
from training.data.masking import NgramMasking, word_starts
from training.data.shards import Shards
from training.errors import TrainingError
from training.model.checkpoint import load_checkpoint

_FIGURES: Final = "figures.json"
_PREDICTIONS: Final = "predictions.npz"
_REPORTS_A_RUN: Final = 50


class AblationError(TrainingError):
    """An ablation that cannot start or go on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What all runs of an ablation have in common; sizes are those of `training.pretrain`.

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
        """All that the figures follow from but the variant, as JSON has it.

        Raises:
            ShardError: a corpus cannot be read, or was made with another tokenizer.
        """
        found = asdict(self)
        for name in ("tokenizer", "device", "compiles"):
            del found[name]
        tokenizer = self.tokenizer / "tokenizer.json"
        for name in ("shards", "validation"):
            found[name] = Shards.open(found[name], tokenizer).fingerprint
        return found

    def arguments(self, variant: Variant, folder: Path) -> list[str]:
        """The command line of `training.pretrain` for a variant."""
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

    def texts(self) -> Texts:
        """What models are measured on."""
        tokenizer = AlbertTokenizer.from_file(self.tokenizer / "tokenizer.json")
        return Texts(
            training=Shards.open(self.shards, self.tokenizer / "tokenizer.json"),
            held_out=Shards.open(self.validation, self.tokenizer / "tokenizer.json"),
            masking=NgramMasking(word_starts=word_starts(tokenizer)),
            length=self.length,
            num_tokens=self.held_out_tokens,
        )


def _report_every(num_steps: int) -> int:
    """So that the last step is reported too."""
    most = max(1, num_steps // _REPORTS_A_RUN)
    return max(size for size in range(1, most + 1) if num_steps % size == 0)


def is_done(folder: Path) -> bool:
    """Whether a run is trained and measured."""
    return (folder / _FIGURES).is_file()


def read_result(folder: Path) -> Result | None:
    """What a run came to; None where it is not done.

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


def make_run(setup: Setup, variant: Variant, folder: Path) -> int:
    """Pretrain one model, or go on with it, and measure it; returns the exit status.

    Raises:
        TrainingError: it cannot be trained or measured.
    """
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
