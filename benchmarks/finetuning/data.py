"""The same examples for both sides: tokenised once, in a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from albert_serve.tokenizer import AlbertTokenizer
from benchmarks.finetuning.jobs import FinetuningTask
from benchmarks.harness.errors import BenchmarkError
from training.data.batch import TokenisedExample
from training.data.feeds import labelled_examples
from training.data.labelled.columns import COMMON_COLUMNS
from training.data.labelled.texts import read_labelled
from training.data.questions import locate_answers, read_squad
from training.data.windows import span_examples


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
    examples: Sequence[TokenisedExample]
    if task == "text-classification":
        texts, _ = read_labelled(files, None, COMMON_COLUMNS, "single_label_classification")
        examples, _ = labelled_examples(
            texts[:num_examples], tokenizer, length=length, truncation=True
        )
        targets = [int(example.target) % 2 for example in examples]
    else:
        questions, _ = locate_answers(read_squad(files)[:num_examples])
        examples = [
            example
            for question in questions
            for example in span_examples(question, tokenizer, length=length)
        ][:num_examples]
        targets = [example.target for example in examples]
    if not examples:
        raise BenchmarkError(f"{', '.join(map(str, files))}: no examples")
    rows = [
        (example.ids, example.types, target)
        for example, target in zip(examples, targets, strict=True)
    ]
    target.write_text(json.dumps(rows), encoding="utf-8")
    return sum(len(example.ids) for example in examples) / len(examples)


def read_examples(file: Path) -> list[Example]:
    """Read what `write_examples` wrote."""
    return [Example(*row) for row in json.loads(file.read_bytes())]
