"""Samples of a task's inputs, and the source that they are drawn from.

Draws have a fixed seed, so that every bundle of a checkpoint is asked the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np

from albert_serve.bundle.weights import TaskName
from albert_serve.tasks.base import EncoderInput, Logits
from albert_serve.tokenizer import AlbertTokenizer
from export.errors import ExportError
from export.real_text import RealData, RealText, read_real_text
from export.source import Source
from training.data.examples import MIN_LENGTH, Example, ExampleSettings, build_examples
from training.data.shards import Part

AGREEMENT: Final = "agreement"
SEED: Final = 12345

_LENGTH: Final = 128  # to which `training.evaluate` cuts held-out text, too
_MOST_EPOCHS: Final = 8
# Of one task, in torch and from the bundle each: some ten minutes of two CPU cores, which is
# 20,000 tokens of xxlarge.
_MOST_FLOPS: Final = 6e13
_MOST_TOKENS: Final = 1 << 17
_CHARACTERS_A_TOKEN: Final = 6

T = TypeVar("T")
Mark: TypeAlias = Callable[[Sequence[Any], Sequence[Any]], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """Inputs that are scored together.

    Attributes:
        read: the predictions that its logits are, one (R, K) array an input.
        rights: what they are marked by, one for each; None where that is not known.
    """

    inputs: list[EncoderInput]
    read: Callable[[list[Logits]], list[Any]]
    rights: list[Any] | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens over all inputs."""
        return sum(len(encoded.ids) for encoded in self.inputs)


def share_equal(predictions: Sequence[Any], rights: Sequence[Any]) -> float:
    """Return the fraction of right predictions, in percent."""
    pairs = zip(predictions, rights, strict=True)
    return 100 * sum(bool(prediction == right) for prediction, right in pairs) / len(rights)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """The sample of one task.

    Attributes:
        metric: its name; with `AGREEMENT`, predictions are marked by those of torch.
        files: the names of those that it was drawn from.
        mark: the figure of predictions, in percent, by what they are marked by.
    """

    metric: str
    items: list[Item]
    files: list[str]
    mark: Mark = share_equal


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """The source of samples.

    Attributes:
        left_out: texts that were drawn and do not fit the model, by task.
    """

    source: Source
    tokenizer: AlbertTokenizer
    data: RealData
    left_out: Counter[TaskName] = field(default_factory=Counter)

    @property
    def max_positions(self) -> int:
        """The maximum tokens of an input."""
        return self.source.config.max_positions

    @property
    def num_tokens(self) -> int:
        """The maximum tokens of a sample; fewer for a larger model."""
        num_flops_a_token = 2 * self.source.config.num_compute_weights
        return int(min(_MOST_TOKENS, _MOST_FLOPS / num_flops_a_token))

    @cached_property
    def text(self) -> RealText:
        """The text, cut to the amount that samples can need."""
        return read_real_text(self.data.text, _CHARACTERS_A_TOKEN * self.num_tokens)

    @cached_property
    def part(self) -> Part:
        """The text's tokens."""
        return self.text.tokenize(self.tokenizer)

    def epochs(self) -> Iterator[list[Example]]:
        """Yield the text as pretraining sequences, with different cuts in each epoch."""
        length = min(_LENGTH, self.max_positions)
        if length < MIN_LENGTH:
            raise ExportError(
                f"the model has {length} positions; to be measured on text it needs {MIN_LENGTH}"
            )
        has_pairs = "sentence-order" in self.source.tasks
        settings = ExampleSettings(length=length, sentence_task="sop" if has_pairs else "none")
        for epoch in range(_MOST_EPOCHS):
            examples = build_examples(self.part, settings, seed=SEED, epoch=epoch)
            rows = zip(examples.bounds.tolist(), examples.labels.tolist(), strict=True)
            yield shuffled(
                Example(0, epoch, number, tuple(bounds), label)
                for number, (bounds, label) in enumerate(rows)
            )

    def gather(self, epochs: Iterable[Iterable[Item]], *, enough: int = 0) -> list[Item]:
        """Gather items of epochs until there are enough predictions or the maximum of tokens."""
        items: list[Item] = []
        num_left, num_predictions = self.num_tokens, 0
        for epoch in epochs:
            for item in epoch:
                if item.num_tokens > num_left:
                    return items
                items.append(item)
                num_left -= item.num_tokens
                num_predictions += len(item.rights or ())
            if num_predictions >= enough:
                break
        return items


def shuffled(values: Iterable[T]) -> list[T]:
    """Shuffle the values with a fixed seed."""
    ordered = list(values)
    return [ordered[index] for index in np.random.default_rng(SEED).permutation(len(ordered))]
