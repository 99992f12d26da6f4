"""Examples of multiple choice: tokenised once, and packed with all choices of a question together.

Shape legend: C sequences, Q questions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from albert_serve.config import AlbertConfig
from albert_serve.progress import progress
from albert_serve.tokenizer import AlbertTokenizer
from training.data.batch import ExampleBatch, MicroBatch, TokenisedExample
from training.data.collate import collate_examples
from training.data.labelled.choices import ChoiceText
from training.data.labelled.errors import raise_listed
from training.data.packing import best_row_length
from training.data.streams import (
    BATCHES_SAMPLED,
    WHOLE,
    Division,
    ExampleStream,
    shuffled_batches,
)

# Of the passes of a step: its questions can be too many for the memory of one.
_TOKENS_A_PASS: Final = 16_384
_NUM_SPECIAL: Final = 3
# Also within words: RACE has "a_." and "to_tomorrow", and the original replaces every underscore.
_BLANK: Final = re.compile("_+")
# Tokens of a choice with its question that are kept in any case.
_CHOICE_TOKENS: Final = 128

Tokens = NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceExample:
    """A question with its choices; questions on one context share its tokens.

    Attributes:
        context: tokens without special ones.
        choices: the same of each choice, with its question.
        target: index of the right choice.
        length: maximum tokens of a sequence.
    """

    context: Tokens
    choices: tuple[Tokens, ...]
    target: int
    length: int

    @property
    def lengths(self) -> list[int]:
        """The tokens of each sequence."""
        return [sum(self._split(choice)) + _NUM_SPECIAL for choice in self.choices]

    @property
    def is_cut(self) -> bool:
        """Whether a sequence lacks tokens of the context or the choice."""
        whole = (len(self.context) + len(choice) + _NUM_SPECIAL for choice in self.choices)
        return max(whole) > self.length

    def sequences(self, tokenizer: AlbertTokenizer) -> list[TokenisedExample]:
        """Return each as [CLS] context [SEP] question choice [SEP], cut by `split_choice`."""
        cls_id, sep_id = tokenizer.cls_id, tokenizer.sep_id
        sequences = []
        for choice in self.choices:
            num_first, num_second = self._split(choice)
            second = choice[len(choice) - num_second :].tolist()
            sequences.append(
                TokenisedExample(
                    ids=[cls_id, *self.context[:num_first].tolist(), sep_id, *second, sep_id],
                    types=[0] * (num_first + 2) + [1] * (num_second + 1),
                    target=0,  # its question has one
                )
            )
        return sequences

    def _split(self, choice: Tokens) -> tuple[int, int]:
        return split_choice(len(self.context), len(choice), self.length)


def with_choice(question: str | None, choice: str) -> str:
    """Return a question with a choice in its blanks; after it, if it has no blanks."""
    if not question:
        return choice
    if _BLANK.search(question):
        return _BLANK.sub(lambda _: choice, question)
    return f"{question} {choice}"


def split_choice(num_context: int, num_choice: int, max_positions: int) -> tuple[int, int]:
    """Return the tokens of a context, its first, and of a choice, its last, that fit the positions.

    The context is cut first. Of a choice, which has its question before it, the last 128 tokens, or
    half of fewer positions, are kept in any case (the original's run_race).
    """
    room = max_positions - _NUM_SPECIAL
    reserved = min(_CHOICE_TOKENS, room // 2)
    num_choice = min(num_choice, max(reserved, room - num_context))
    return min(num_context, room - num_choice), num_choice


def choice_examples(
    texts: Sequence[ChoiceText], tokenizer: AlbertTokenizer, *, length: int, truncation: bool
) -> tuple[list[ChoiceExample], int]:
    """Tokenise questions, and return how many have a context or choice that is cut."""
    examples, errors, num_truncated = [], [], 0
    context: tuple[str, Tokens] | None = None
    for text in progress(texts, title="tokenising questions", unit="questions"):
        # The questions on a passage follow each other.
        if context is None or context[0] != text.context:
            context = text.context, _tokens(tokenizer, text.context)
        example = tokenise_choices(text, tokenizer, length=length, context=context[1])
        if example.is_cut and not truncation:
            errors.append(f"{text.place}: over {length} tokens; --truncation truncates such texts")
        num_truncated += example.is_cut
        examples.append(example)
    raise_listed(errors)
    return examples, num_truncated


def tokenise_choices(
    text: ChoiceText, tokenizer: AlbertTokenizer, *, length: int, context: Tokens | None = None
) -> ChoiceExample:
    """Tokenise a question.

    Args:
        length: tokens that its sequences are cut to.
        context: its context's tokens, if they are known.
    """
    return ChoiceExample(
        context=_tokens(tokenizer, text.context) if context is None else context,
        choices=tuple(
            _tokens(tokenizer, with_choice(text.question, choice)) for choice in text.choices
        ),
        target=text.label,
        length=length,
    )


def _tokens(tokenizer: AlbertTokenizer, text: str) -> Tokens:
    return np.array(tokenizer.encode_plain(text).ids, np.int32)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceBatch(ExampleBatch):
    """A micro-batch with one prediction for each question.

    Attributes:
        num_choices: (Q,) of each question; `firsts` and `sizes` are those of all choices, (C,).
        targets: (Q,).
    """

    num_choices: Tensor


def collate_choices(
    examples: Sequence[ChoiceExample], tokenizer: AlbertTokenizer, *, row_length: int
) -> ChoiceBatch:
    """Pack the choices of questions, none longer than `row_length`, by best fit into rows."""
    sequences = [sequence for example in examples for sequence in example.sequences(tokenizer)]
    packed = collate_examples("multiple-choice", sequences, row_length=row_length)
    values: dict[str, Any] = {field.name: getattr(packed, field.name) for field in fields(packed)}
    values |= {
        "counts": {"multiple-choice": len(examples)},
        "targets": torch.tensor([example.target for example in examples]),
    }
    return ChoiceBatch(
        **values, num_choices=torch.tensor([len(example.choices) for example in examples])
    )


class ChoiceBatches(Sequence[ChoiceBatch]):
    """Questions, in order, as micro-batches of a limited number of tokens, packed when read."""

    def __init__(
        self, examples: Sequence[ChoiceExample], tokenizer: AlbertTokenizer, *, row_length: int
    ) -> None:
        self._passes = list(_passes(examples))
        self._tokenizer = tokenizer
        self._row_length = row_length

    def __len__(self) -> int:
        return len(self._passes)

    def __getitem__(self, number: Any) -> Any:
        """Return one micro-batch, which is not kept."""
        return collate_choices(self._passes[number], self._tokenizer, row_length=self._row_length)


def _passes(examples: Sequence[ChoiceExample]) -> Iterator[list[ChoiceExample]]:
    """Yield questions that go through the model together; one that is over the limit alone."""
    passed: list[ChoiceExample] = []
    num_tokens = 0
    for example in examples:
        num_more = sum(example.lengths)
        if passed and num_tokens + num_more > _TOKENS_A_PASS:
            yield passed
            passed, num_tokens = [], 0
        passed.append(example)
        num_tokens += num_more
    if passed:
        yield passed


@dataclass(kw_only=True)
class _ChoiceStream(ExampleStream[ChoiceExample]):
    """Task stream over questions, `batch_size` a step in as many micro-batches as they need."""

    tokenizer: AlbertTokenizer

    def passes(self, examples: Sequence[ChoiceExample]) -> Sequence[Sequence[ChoiceExample]]:
        """Return questions in the parts that go through the model together."""
        return list(_passes(examples))

    def pack(self, examples: Sequence[ChoiceExample], row_length: int) -> MicroBatch:
        """Return questions as one micro-batch."""
        return collate_choices(examples, self.tokenizer, row_length=row_length)


def choice_stream(
    examples: Sequence[ChoiceExample],
    tokenizer: AlbertTokenizer,
    config: AlbertConfig,
    *,
    batch_size: int,
    seed: int,
    division: Division = WHOLE,
) -> _ChoiceStream:
    """Return the task stream of questions, packed into rows of the length that costs least."""
    steps = islice(shuffled_batches(len(examples), batch_size, seed), BATCHES_SAMPLED)
    passes = [passed for step in steps for passed in _passes([examples[i] for i in step])]
    return _ChoiceStream(
        task="multiple-choice",
        examples=examples,
        batch_size=batch_size,
        row_length=best_row_length(
            [np.concatenate([example.lengths for example in passed]) for passed in passes],
            longest=max(max(example.lengths) for example in examples),
            config=config,
        ),
        seed=seed,
        division=division,
        tokenizer=tokenizer,
    )
