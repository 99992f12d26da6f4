"""Common parts of training tasks: their interface to a run, and the choice of held-out texts."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import numpy as np

from albert_serve.config import AlbertConfig
from albert_serve.tokenizer import AlbertTokenizer
from training.data.batch import ExampleBatch, TokenisedExample
from training.data.collate import collate_examples
from training.data.labelled.rows import collecting, raise_listed
from training.data.streams import Division, ExampleStream, TaskStream, example_stream
from training.errors import RunError
from training.loop.distributed import World
from training.loop.validation import Validation
from training.losses import LogitsFunction, LossFunction, compile_logits
from training.model.heads import Task

# The splits of labelled data.
TRAINING: Final = "training"
VALIDATION: Final = "validation"
# If there are fewer texts, all of them are used for training.
_MIN_TEXTS_TO_DIVIDE: Final = 50
# Maximum number of held-out texts, because validation of more texts takes too long.
_MAX_HELD_OUT: Final = 2000
_SPLIT_SEED: Final = 0
_VALIDATION_BATCH_SIZE: Final = 64
_Text = TypeVar("_Text")
_Example = TypeVar("_Example")


class LongTexts(NamedTuple):
    """The number of texts with more than --length tokens, and the number of all texts."""

    num_long: int
    num_texts: int


_NO_TEXTS: Final = LongTexts(0, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSetup:
    """The properties of a run that its tasks need to read their data.

    Attributes:
        architecture: configuration of the model.
        length: maximum number of tokens in a sequence.
        truncation: whether to truncate longer texts instead of rejecting them.
        micro_batch_size: maximum number of examples in a micro-batch, or None for one micro-batch
            per process.
        compiles: whether to compile the model and its losses.
    """

    tokenizer: AlbertTokenizer
    architecture: AlbertConfig
    world: World
    seed: int
    length: int
    truncation: bool
    micro_batch_size: int | None
    compiles: bool

    @property
    def row_length(self) -> int:
        """Minimum row length for held-out examples, in tokens."""
        return min(self.length, self.architecture.max_positions)

    @property
    def division(self) -> Division:
        """The division of a step's examples into micro-batches and among processes."""
        return Division(
            micro_batch_size=self.micro_batch_size,
            rank=self.world.rank,
            world_size=self.world.size,
            by_length=self.world.device.type == "cpu",
        )

    def compiled(self, logits: LogitsFunction) -> LogitsFunction:
        """Compile a model's forward pass if the run compiles."""
        return compile_logits(logits) if self.compiles else logits

    def stream(
        self, task: Task, examples: Sequence[TokenisedExample], batch_size: int
    ) -> ExampleStream[TokenisedExample]:
        """Return the task stream of examples, packed into rows of the length that costs least."""
        return example_stream(
            task,
            examples,
            self.architecture,
            batch_size=batch_size,
            seed=self.seed,
            division=self.division,
        )

    def tokenise(
        self,
        texts: Mapping[str, Sequence[_Text]],
        make: Callable[..., tuple[Sequence[_Example], int]],
    ) -> tuple[dict[str, Sequence[_Example]], LongTexts]:
        """Tokenise the texts of each split, and truncate texts of more than `length` tokens.

        Args:
            make: function that makes examples from texts, such as `labelled_examples`.

        Returns:
            Examples by split, and the number of truncated texts.
        """
        errors: list[str] = []
        examples: dict[str, Sequence[_Example]] = {}
        num_long = 0
        for split, split_texts in texts.items():
            with collecting(errors):
                examples[split], num_truncated = make(
                    split_texts, self.tokenizer, length=self.length, truncation=self.truncation
                )
                num_long += num_truncated
        raise_listed(errors)
        return examples, LongTexts(num_long, sum(map(len, texts.values())))


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingTask:
    """A training task of a run, with its data in memory.

    Attributes:
        losses: loss functions by the task names of the micro-batches.
        validation: measurement on held-out data, or None without held-out data.
        metric: validation metric that selects the best checkpoint.
        labels: keys of `config.json` that name the outputs of the task's head, or None if the
            outputs have no names.
        long_texts: number of long texts and of all texts, in training and validation together.
    """

    name: Task
    streams: Sequence[TaskStream]
    losses: Mapping[str, LossFunction]
    validation: Validation | None = None
    metric: str = "loss"
    labels: Mapping[str, Any] | None = None
    long_texts: LongTexts = _NO_TEXTS

    @property
    def heads(self) -> list[Task]:
        """The heads of the model that the task trains."""
        return [head for stream in self.streams for head in stream.tasks]


class _Divisible(Protocol):
    """A text for training or validation."""

    @property
    def text(self) -> str: ...

    @property
    def pair(self) -> str | None: ...

    @property
    def label(self) -> Any: ...


_DivisibleT = TypeVar("_DivisibleT", bound=_Divisible)


def hold_out(texts: Sequence[_DivisibleT], fraction: float) -> dict[str, list[_DivisibleT]]:
    """Divide texts into training and validation, in the same way in every run.

    The fraction is the same for every label, or for every range of a regression's scores. If a
    label has only one text, the text is for training. Equal texts are in the same split.
    """
    copies: dict[tuple[str, str | None], list[int]] = {}
    for index, text in enumerate(texts):
        key = (_normalised(text.text), text.pair and _normalised(text.pair))
        copies.setdefault(key, []).append(index)
    groups = list(copies.values())
    if num_copies := len(texts) - len(groups):
        print(
            f"{num_copies:,} of {len(texts):,} texts are duplicates. "
            "Duplicates are in the same split."
        )
    if len(groups) < _MIN_TEXTS_TO_DIVIDE:
        print(f"{len(groups):,} texts are too few for validation. All are used for training.")
        return {TRAINING: list(texts)}
    labels = [texts[group[0]].label for group in groups]
    counts = Counter(labels)
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(groups)).tolist()
    divisible = [n for n in order if isinstance(labels[n], float) or counts[labels[n]] > 1]
    divisible.sort(key=lambda n: labels[n])
    num_held_out = min(round(fraction * len(divisible)), _MAX_HELD_OUT)
    held_out_groups = (divisible[n * len(divisible) // num_held_out] for n in range(num_held_out))
    held_out = {index for n in held_out_groups for index in groups[n]}
    print(f"{len(held_out):,} of {len(texts):,} texts are held out for validation.")
    return {
        TRAINING: [text for index, text in enumerate(texts) if index not in held_out],
        VALIDATION: [texts[index] for index in sorted(held_out)],
    }


def _normalised(text: str) -> str:
    """Normalise the case, white space and Unicode characters of a text."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def validation_batches(
    task: Task, examples: Sequence[TokenisedExample], *, row_length: int
) -> list[ExampleBatch]:
    """Collate held-out examples, sorted by length, into rows of `row_length` or more tokens."""
    ordered = sorted(examples, key=lambda example: len(example.ids))
    longest = max(row_length, max((len(example.ids) for example in ordered), default=0))
    return [
        collate_examples(task, ordered[begin : begin + _VALIDATION_BATCH_SIZE], row_length=longest)
        for begin in range(0, len(ordered), _VALIDATION_BATCH_SIZE)
    ]


def check_metric(metric: str | None, allowed: Sequence[str], data: str) -> None:
    """Check that `--metric`, if specified, applies to the data."""
    if metric not in (None, *allowed):
        raise RunError(
            f"--metric {metric} does not apply to {data}. Choose one of {', '.join(allowed)}."
        )
