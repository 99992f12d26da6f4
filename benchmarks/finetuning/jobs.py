"""The jobs of child processes: finetuning of one model on the same examples."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from albert_serve.config import PRESETS, AlbertConfig
from benchmarks.pretraining.jobs import KEEPS_MEMORY, HfSettings

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
class Job:
    """The finetuning that a child process does.

    Attributes:
        hf: settings of `transformers`; None for this package.
        examples: the file that `data.write_examples` wrote.
        compiles: whether the model's pass is compiled.
    """

    case: Case
    hf: HfSettings | None
    examples: Path
    device: str
    num_threads: int
    compiles: bool

    @property
    def title(self) -> str:
        """The case."""
        return str(self.case)

    @property
    def name(self) -> str:
        """The contestant and its settings."""
        words = [] if self.hf is None else [str(self.hf)]
        words.append("compiled" if self.compiles else "not compiled")
        return f"{'ours' if self.hf is None else 'transformers'} ({', '.join(words)})"

    @property
    def program(self) -> str:
        """The module that does it."""
        return f"benchmarks.finetuning.{'ours' if self.hf is None else 'hf'}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the process that does it."""
        kept = KEEPS_MEMORY if self.hf is not None and self.hf.keeps_memory else {}
        return {"OMP_NUM_THREADS": str(self.num_threads), "TOKENIZERS_PARALLELISM": "false", **kept}

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Return the job that `to_json` wrote."""
        fields = json.loads(text)
        hf = None if fields["hf"] is None else HfSettings(**fields["hf"])
        own = {"case": Case(**fields["case"]), "hf": hf, "examples": Path(fields["examples"])}
        return cls(**{**fields, **own})
