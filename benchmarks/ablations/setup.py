"""The settings that all runs of an ablation share."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch

from albert_serve.tokenizer import AlbertTokenizer
from benchmarks.ablations.measure import Texts
from benchmarks.ablations.tables import Variant
from training.data.masking import NgramMasking, word_starts
from training.data.shards import Shards

_REPORTS_A_RUN: Final = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
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

    def texts(self) -> Texts:
        """Return the texts that models are measured on."""
        tokenizer = AlbertTokenizer.from_file(self.tokenizer / "tokenizer.json")
        return Texts(
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
