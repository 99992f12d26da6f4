"""Questions for pretraining question answering, made from plain text (Splinter, Ram et al. 2021).

A multi-word span that recurs in a passage is replaced by [MASK] in one of its sentences, which is
the question; the rest of the passage is the context, and another occurrence of the span the
answer. Written in SQuAD's JSON format, which `albert-serve finetune --question-answering` reads.
The same corpus, options and seed give the same file to the byte.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from albert_serve.progress import progress_bar
from recipes.albert_small_en.making_questions import MakingQuestions, run_making
from recipes.albert_small_en.recurring import STOP_WORDS, passages, span_questions, to_squad
from recipes.albert_small_en.squad_file import write_squad_file
from training.data.corpus import (
    TEXT_COLUMN_HELP,
    CorpusPosition,
    find_files,
    read_from,
    read_lines,
    split_sentences,
)
from training.data.questions import Question
from training.options.flags import flag
from training.options.values import Count, Seed

_EXAMPLES: Final = r"""examples:
  python -m recipes.albert_small_en.spans wiki/*.jsonl.xz spans.json.xz
  python -m recipes.albert_small_en.spans wiki/ spans.json --max-questions 100000 \
      --passage-words 150
  albert-serve finetune --initialize-from runs/base/checkpoint \
      --question-answering spans.json.xz --length 384 --budget 2h --output runs/spans
"""


@dataclass(frozen=True, kw_only=True)
class _SpansConfig(MakingQuestions, title="questions"):
    """The files of text, and the choice of spans."""

    text_column: str | None = flag(TEXT_COLUMN_HELP, metavar="NAME")
    passage_words: Count = flag("maximum words of a passage", 200)
    max_questions: Count | None = flag("maximum questions in all")
    stop_words: Path | None = flag(
        "words with which no span begins or ends, one a line (English ones)", metavar="FILE"
    )
    seed: Seed = flag("of the choice of spans", 0)


def _documents(config: _SpansConfig) -> Iterator[list[Question]]:
    """Yield the questions of each document."""
    files = find_files(config.files)
    stop_words = STOP_WORDS
    if config.stop_words is not None:
        stop_words = frozenset(line.strip().lower() for line in read_lines(config.stop_words))
    num_bytes = sum(file.stat().st_size for file in files)
    with progress_bar(title="reading", total=num_bytes, unit="B", unit_scale=True) as bar:
        documents = read_from(files, CorpusPosition(), config.text_column)
        for number, document in enumerate(documents):
            rng = np.random.default_rng([config.seed, number])
            document_passages = passages(split_sentences(document.text), config.passage_words)
            yield [
                question
                for index, passage in enumerate(document_passages)
                for question in span_questions(passage, rng, f"{number}-{index}", stop_words)
            ]
            bar.update(document.end.num_bytes - bar.n)


def _articles(documents: Iterable[list[Question]], most: int | None) -> Iterator[dict[str, Any]]:
    """Yield the documents with questions in SQuAD's format, of the corpus read as a stream.

    Args:
        most: maximum number of questions, after which the corpus is read no further.
    """
    num_questions = 0
    for document in documents:
        kept = document[: None if most is None else most - num_questions]
        if kept:
            yield {"title": kept[0].id, "paragraphs": list(map(to_squad, kept))}
            num_questions += len(kept)
        if num_questions == most:
            return


def _run(config: _SpansConfig) -> int:
    num_questions = write_squad_file(
        config.output,
        "recurring spans",
        _articles(_documents(config), config.max_questions),
        if_none="no span of several words recurs in a passage of the corpus; give more text, or "
        "longer passages (--passage-words)",
    )
    print(f"{config.output}: {num_questions:,} questions")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    return run_making(
        _SpansConfig,
        _run,
        arguments,
        prog="python -m recipes.albert_small_en.spans",
        description=__doc__,
        examples=_EXAMPLES,
        files="files of text, or folders",
    )


if __name__ == "__main__":
    sys.exit(main())
