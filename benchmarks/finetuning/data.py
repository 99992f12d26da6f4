"""The same examples for both sides: tokenised once, in a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from albert_serve.tokenizer import AlbertTokenizer
from benchmarks.finetuning.jobs import FinetuningTask
from benchmarks.harness.errors import BenchmarkError
from training.data.labelled.columns import COMMON_COLUMNS
from training.data.labelled.texts import read_labelled
from training.data.questions import locate_answers, read_squad, span_examples
from training.data.streams import labelled_examples


@dataclass(frozen=True, slots=True)
class Example:
    """A tokenised example.

    Attributes:
        target: a label of two, or the first and last position of an answer.
    """

    ids: list[int]
    types: list[int]
    target: Any


def write_examples(
    task: FinetuningTask,
    files: Sequence[Path],
    tokenizer: AlbertTokenizer,
    target: Path,
    *,
    length: int,
    num_examples: int,
) -> float:
    """Write the first examples of files, as `training.finetune` makes them.

    Returns:
        The mean number of their tokens.

    Raises:
        BenchmarkError: there are none.
        CorpusError: the files cannot be read.
    """
    make = _texts if task == "text-classification" else _spans
    examples = make(files, tokenizer, length, num_examples)
    if not examples:
        raise BenchmarkError(f"{', '.join(map(str, files))}: no examples")
    rows = [(example.ids, example.types, example.target) for example in examples]
    target.write_text(json.dumps(rows), encoding="utf-8")
    return sum(len(example.ids) for example in examples) / len(examples)


def read_examples(file: Path) -> list[Example]:
    """Read what `write_examples` wrote."""
    return [Example(*row) for row in json.loads(file.read_bytes())]


def _texts(
    files: Sequence[Path], tokenizer: AlbertTokenizer, length: int, num_examples: int
) -> list[Example]:
    """Return texts; of more than two labels the even ones count as one, as do the odd ones."""
    texts, _ = read_labelled(files, None, COMMON_COLUMNS, "single_label_classification")
    examples, _ = labelled_examples(texts[:num_examples], tokenizer, length=length, truncation=True)
    return [
        Example(example.ids, example.types, int(example.label) % 2)
        for example in examples
        if not isinstance(example.label, tuple)
    ]


def _spans(
    files: Sequence[Path], tokenizer: AlbertTokenizer, length: int, num_examples: int
) -> list[Example]:
    questions, _ = locate_answers(read_squad(files)[:num_examples])
    windows = (
        window
        for question in questions
        for window in span_examples(question, tokenizer, length=length)
    )
    return [
        Example(window.ids, window.types, list(window.target))
        for window in islice(windows, num_examples)
    ]
