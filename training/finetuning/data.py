"""What the data of all tasks of a finetuning run is read with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from albert_serve.config import AlbertConfig
from albert_serve.tokenizer import AlbertTokenizer
from training.data.labelled.errors import collecting, raise_listed
from training.data.streams import Division
from training.finetuning.settings import FinetuneSettings
from training.loop.distributed import World
from training.system.precision import PrecisionName

# The splits of labelled data.
TRAINING: Final = "training"
VALIDATION: Final = "validation"
# Examples of a batch of validation.
VALIDATED_TOGETHER: Final = 64
_Text = TypeVar("_Text")
_Example = TypeVar("_Example")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataContext:
    """The settings, the model's sizes and the machine that data is read for.

    Attributes:
        start: folder of the initial checkpoint.
        compiles: whether the model and its losses are compiled.
    """

    settings: FinetuneSettings
    start: Path
    tokenizer: AlbertTokenizer
    architecture: AlbertConfig
    world: World
    precision: PrecisionName
    compiles: bool

    @property
    def division(self) -> Division:
        """The division of a step's examples into micro-batches and among processes."""
        return Division(
            micro_batch_size=self.settings.micro_batch_size,
            rank=self.world.rank,
            world_size=self.world.size,
            by_length=self.world.device.type == "cpu",
        )

    def tokenise(
        self,
        texts: Mapping[str, Sequence[_Text]],
        make: Callable[..., tuple[Sequence[_Example], int]],
        title: str,
    ) -> dict[str, Sequence[_Example]]:
        """Tokenise the texts of each split, cut to --length, and report how many were cut.

        Args:
            make: `labelled_examples` or `choice_examples`.
            title: the name of what is tokenised.

        Raises:
            CorpusError: texts are too long and may not be cut; those of all splits are listed.
        """
        length, truncation = self.settings.length, self.settings.truncation
        errors: list[str] = []
        examples: dict[str, Sequence[_Example]] = {}
        for split, its in texts.items():
            with collecting(errors):
                examples[split], num_cut = make(
                    its, self.tokenizer, length=length, truncation=truncation
                )
                if num_cut:
                    print(f"{num_cut:,} of {len(its):,} {title} are cut to {length} tokens")
        raise_listed(errors)
        return examples
