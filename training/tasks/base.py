"""Parts of every training task: what a run gives it, what it gives the run, and held-out data."""

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
# The fewest texts of which some are held out, and the most that are.
_MIN_DIVIDED: Final = 50
_MAX_HELD_OUT: Final = 2000
_SPLIT_SEED: Final = 0
# Examples of a batch of validation.
_VALIDATED_TOGETHER: Final = 64
_Text = TypeVar("_Text")
_Example = TypeVar("_Example")


class LongTexts(NamedTuple):
    """The number of texts that are over --length tokens, and of all texts."""

    num_long: int
    num_texts: int


_NO_TEXTS: Final = LongTexts(0, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSetup:
    """The parts of a run that its tasks read their data for.

    Attributes:
        architecture: sizes of the model.
        length: maximum tokens of a sequence.
        truncation: whether longer texts are truncated; otherwise they are an error.
        micro_batch_size: maximum number of examples of a micro-batch; None for one micro-batch a
            process.
        compiles: whether the model and its losses are compiled.
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
        """The least tokens of the rows of held-out examples."""
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
        """Return a model's pass over a batch, compiled or not."""
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
        """Tokenise the texts of each split, and truncate those over `length` tokens.

        Args:
            make: `labelled_examples` or `choice_examples`.

        Returns:
            The examples of each split, and how many were truncated.
        """
        errors: list[str] = []
        examples: dict[str, Sequence[_Example]] = {}
        num_long = 0
        for split, its in texts.items():
            with collecting(errors):
                examples[split], number = make(
                    its, self.tokenizer, length=self.length, truncation=self.truncation
                )
                num_long += number
        raise_listed(errors)
        return examples, LongTexts(num_long, sum(map(len, texts.values())))


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingTask:
    """A task of a run, whose data is read.

    Attributes:
        losses: the loss function of each of the streams' micro-batches, by their names.
        validation: on held-out data; None without any.
        figure: of validation, that decides which checkpoint is best.
        labels: the keys of `config.json` that name the outputs of the task's head; None if they
            have no names.
        long_texts: those of training and validation.
    """

    name: Task
    streams: Sequence[TaskStream]
    losses: Mapping[str, LossFunction]
    validation: Validation | None = None
    figure: str = "loss"
    labels: Mapping[str, Any] | None = None
    long_texts: LongTexts = _NO_TEXTS

    @property
    def heads(self) -> list[Task]:
        """The heads of the model that it trains."""
        return [head for stream in self.streams for head in stream.tasks]


class _Divisible(Protocol):
    """A text that is trained on or held out."""

    @property
    def text(self) -> str: ...

    @property
    def pair(self) -> str | None: ...

    @property
    def label(self) -> Any: ...


_DivisibleT = TypeVar("_DivisibleT", bound=_Divisible)


def hold_out(texts: Sequence[_DivisibleT], part: float) -> dict[str, list[_DivisibleT]]:
    """Divide texts into training and validation, the same in each run.

    Each label has the same part of both, and of a regression each range of scores; a label of a
    single text stays in training. Equal texts are on one side.
    """
    copies: dict[tuple[str, str | None], list[int]] = {}
    for index, text in enumerate(texts):
        key = (_normalised(text.text), text.pair and _normalised(text.pair))
        copies.setdefault(key, []).append(index)
    groups = list(copies.values())
    if num_copies := len(texts) - len(groups):
        print(
            f"{num_copies:,} of {len(texts):,} texts equal another one; equal texts stay together"
        )
    if len(groups) < _MIN_DIVIDED:
        print(f"{len(groups):,} texts are too few to hold some out; there is no validation")
        return {TRAINING: list(texts)}
    labels = [texts[group[0]].label for group in groups]
    counts = Counter(labels)
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(groups)).tolist()
    several = [n for n in order if isinstance(labels[n], float) or counts[labels[n]] > 1]
    several.sort(key=lambda n: labels[n])
    num_held_out = min(round(part * len(several)), _MAX_HELD_OUT)
    chosen = (several[n * len(several) // num_held_out] for n in range(num_held_out))
    held_out = {index for n in chosen for index in groups[n]}
    print(f"{len(held_out):,} of {len(texts):,} texts are held out for validation")
    return {
        TRAINING: [text for index, text in enumerate(texts) if index not in held_out],
        VALIDATION: [texts[index] for index in sorted(held_out)],
    }


def _normalised(text: str) -> str:
    """Return a text without differences of case, white space and Unicode form."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def validation_batches(
    task: Task, examples: Sequence[TokenisedExample], *, row_length: int
) -> list[ExampleBatch]:
    """Return held-out examples in batches of like lengths, in rows of this length or longer."""
    ordered = sorted(examples, key=lambda example: len(example.ids))
    longest = max(row_length, max((len(example.ids) for example in ordered), default=0))
    return [
        collate_examples(task, ordered[begin : begin + _VALIDATED_TOGETHER], row_length=longest)
        for begin in range(0, len(ordered), _VALIDATED_TOGETHER)
    ]


def check_metric(metric: str | None, allowed: Sequence[str], data: str) -> None:
    """Check that `--metric`, if it is given, is a figure of the data."""
    if metric not in (None, *allowed):
        raise RunError(f"--metric {metric} does not apply to {data}; choose {', '.join(allowed)}")
