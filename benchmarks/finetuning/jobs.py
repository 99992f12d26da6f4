"""The jobs of child processes: finetuning of one model on the same examples."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from albert_serve.config import PRESETS, AlbertConfig
from benchmarks.pretraining.jobs import TurnJob

FinetuningTask: TypeAlias = Literal["text-classification", "question-answering"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One model on one task.

    Attributes:
        task: with two labels, or spans.
        shape: a preset's name.
        vocab_size: pieces of the model.
        length: the most tokens of an example.
        batch_size: examples a step, of both sides.
    """

    task: FinetuningTask
    shape: str
    vocab_size: int
    length: int
    batch_size: int

    @property
    def config(self) -> AlbertConfig:
        """The model's sizes, with as many positions as the length needs."""
        sizes = PRESETS[self.shape].to_hf()
        longest = max(self.length, PRESETS[self.shape].max_positions)
        changes = {"vocab_size": self.vocab_size, "max_position_embeddings": longest}
        return AlbertConfig.from_hf({**sizes, **changes})

    def __str__(self) -> str:
        return (
            f"{self.task}, {self.shape}, {self.batch_size} examples a step of at most "
            f"{self.length} tokens"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Job(TurnJob):
    """The finetuning that a child process does.

    Attributes:
        examples: the file that `data.write_examples` wrote.
    """

    case: Case
    examples: Path

    @property
    def name(self) -> str:
        """The contestant and its settings."""
        words = [] if self.hf is None else [str(self.hf)]
        words.append("compiled" if self.compiles else "not compiled")
        return f"{'ours' if self.hf is None else 'transformers'} ({', '.join(words)})"
