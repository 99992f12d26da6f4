"""The jobs of child processes, and their answers."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal, Self, get_type_hints

from albert_serve.config import PRESETS, AlbertConfig

Attention = Literal["sdpa", "eager"]
Padding = Literal["full", "grouped"]
Rival = Literal["sdpa", "sdpa-kept", "eager-kept"]
# Read by glibc's malloc and by torch when a process begins: memory that a step gives back stays
# with the process, in large pages, instead of being mapped and zeroed anew by the next step.
KEEPS_MEMORY: Final = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_TOP_PAD_": "67108864",
    "THP_MEM_ALLOC_ENABLE": "1",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One model at one length.

    Attributes:
        shape: a preset's name.
        vocab_size: pieces of the model, at least as many as the tokenizer has.
        length: tokens of a row.
        num_rows: rows of a step of ours.
    """

    shape: str
    vocab_size: int
    length: int
    num_rows: int

    @property
    def config(self) -> AlbertConfig:
        """The model's sizes, with as many positions as the length needs, and without dropout."""
        sizes = PRESETS[self.shape].to_hf()
        longest = max(self.length, PRESETS[self.shape].max_positions)
        changes = {"vocab_size": self.vocab_size, "max_position_embeddings": longest}
        return AlbertConfig.from_hf({**sizes, **changes})

    def __str__(self) -> str:
        return f"{self.shape}, {self.num_rows} x {self.length} tokens"


@dataclass(frozen=True, kw_only=True, slots=True)
class HfSettings:
    """The training settings of `transformers`.

    Attributes:
        num_rows: sequences of a step (`per_device_train_batch_size`).
        attention: its implementation.
        padding: every sequence to the full length, which gives one shape; or batches of like
            lengths, each padded to a multiple of 8 (`group_by_length`).
        keeps_memory: whether malloc keeps the memory that a step frees.
    """

    num_rows: int
    attention: Attention = "sdpa"
    padding: Padding = "full"
    keeps_memory: bool = False

    def __str__(self) -> str:
        words = [f"{self.num_rows} rows", self.attention]
        words += ["grouped by length"] if self.padding == "grouped" else []
        words += ["memory kept"] if self.keeps_memory else []
        return ", ".join(words)


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnJob(ABC):
    """The job of a child process that trains in turns.

    Attributes:
        case: what is trained, the same for all contestants.
        hf: settings of `transformers`; None for this package.
        device: the device to train on.
        num_threads: threads of the process.
        compiles: whether the model's pass is compiled.
    """

    case: object
    hf: HfSettings | None
    device: str
    num_threads: int
    compiles: bool

    @property
    def title(self) -> str:
        """The case."""
        return str(self.case)

    @property
    @abstractmethod
    def name(self) -> str:
        """The contestant and its settings."""

    @property
    def program(self) -> str:
        """The module that does it, whose argument is `to_json`: beside the job's own."""
        folder = type(self).__module__.rpartition(".")[0]
        return f"{folder}.{'ours' if self.hf is None else 'hf'}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the process."""
        kept = KEEPS_MEMORY if self.hf is not None and self.hf.keeps_memory else {}
        return {"OMP_NUM_THREADS": str(self.num_threads), "TOKENIZERS_PARALLELISM": "false", **kept}

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the job that `to_json` wrote."""
        written = json.loads(text)
        types = get_type_hints(cls)
        paths = {name: Path(written[name]) for name, kind in types.items() if kind is Path}
        hf = None if written["hf"] is None else HfSettings(**written["hf"])
        return cls(**{**written, **paths, "case": types["case"](**written["case"]), "hf": hf})


@dataclass(frozen=True, kw_only=True, slots=True)
class Job(TurnJob):
    """The pretraining that a child process does.

    Attributes:
        shards: folder of the tokenised corpus.
        examples: folder of the same text's examples, as `data.write` writes them.
        tokenizer: folder of the `tokenizer.json` that the data was made with.
    """

    case: Case
    shards: Path
    examples: Path
    tokenizer: Path
    compiles: bool = True

    @property
    def name(self) -> str:
        """The contestant and its settings."""
        return "ours" if self.hf is None else f"transformers ({self.hf})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """The measurement of one turn.

    Attributes:
        seconds: of wall clock.
        cpu_seconds: of all threads together; where other programs run, too, the better measure.
        num_tokens: real tokens, padding not counted.
        peak_bytes: most memory until now: of the process, or on a GPU of its tensors.
    """

    seconds: float
    cpu_seconds: float
    num_steps: int
    num_tokens: int
    peak_bytes: int

    @property
    def tokens_per_s(self) -> float:
        """Real tokens a second of wall clock."""
        return self.num_tokens / self.seconds

    @property
    def tokens_per_cpu_s(self) -> float:
        """Real tokens a second that a processor worked."""
        return self.num_tokens / self.cpu_seconds
