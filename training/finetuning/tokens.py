"""Token classification in a finetuning run: its data, its loss, and validation on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from training.data.labelled.entities import label_names, read_tagged
from training.data.streams import TaskStream, example_stream
from training.data.tokens import token_examples
from training.evaluation.tokens import HeldOutEntities, entity_items
from training.evaluation.torch_engine import EngineItem
from training.evaluation.validation import Validation
from training.finetuning.config import FinetuneConfig
from training.finetuning.data import (
    TRAINING,
    VALIDATION,
    check_metric,
    division_of,
    hold_out,
    loss_function,
)
from training.finetuning.start import Start
from training.loop.distributed import World
from training.losses import LossFunction
from training.model.checkpoint import label_keys
from training.model.heads import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenTags:
    """Token classification in a run.

    Attributes:
        names: of the tags.
        losses: the loss function, by the name of the stream's micro-batches.
        held_out: texts of validation.
        figure: what decides which validation is best.
    """

    name: ClassVar[Task] = "token-classification"
    figure: ClassVar[str] = "f1"
    names: Sequence[str]
    streams: Sequence[TaskStream]
    losses: Mapping[str, LossFunction]
    held_out: Sequence[EngineItem] = ()

    @classmethod
    def read(cls, config: FinetuneConfig, start: Start, world: World, batch_size: int) -> Self:
        """Read and tokenise the texts of the training and validation files.

        Raises:
            CorpusError: files cannot be read, or have no entity; all of it is listed.
            RunError: `--metric` is none of entities.
        """
        check_metric(config.metric, (cls.figure,), "entities")
        texts = {TRAINING: read_tagged(config.token_classification)}
        if config.validation:
            texts[VALIDATION] = read_tagged(config.validation)
        elif config.splits_validation:
            texts = hold_out(texts[TRAINING], config.validation_split)
        names = label_names(texts[TRAINING])
        length = min(config.length, start.architecture.max_positions)
        stream = example_stream(
            cls.name,
            token_examples(texts[TRAINING], start.tokenizer, names, length=length),
            start.architecture,
            batch_size=batch_size,
            seed=config.seed,
            division=division_of(config, world),
        )
        longest = start.architecture.max_positions
        held_out = entity_items(texts.get(VALIDATION, ()), start.tokenizer, names, length=longest)
        return cls(
            names=names,
            streams=(stream,),
            losses={cls.name: loss_function(cls.name, start)},
            held_out=list(held_out),
        )

    @property
    def labels(self) -> dict[str, Any]:
        """The keys of `config.json` that name the labels."""
        return label_keys(self.names)

    def validation(self, *, every: int, row_length: int) -> Validation:
        """Return the validation on the entities of the held-out texts."""
        return Validation(batches=(), every=every, held_out=HeldOutEntities(items=self.held_out))
