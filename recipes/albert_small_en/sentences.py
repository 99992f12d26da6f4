"""Write the sentences of documents, one a line and each once: unlabelled texts for a teacher.

Of files in SQuAD's format, the sentences of their questions and contexts.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from albert_serve.files import write_atomically
from albert_serve.progress import progress
from training.data.corpus import find_files, read_documents, split_sentences
from training.data.questions import read_squad
from training.errors import report_errors
from training.options.values import parse_count
from training.system.command_line import make_parser

_EXAMPLES: Final = r"""examples:
  python -m recipes.albert_small_en.sentences imdb/train.jsonl.xz --output runs/sentences.txt
  python -m recipes.albert_small_en.sentences squad/train-v1.1.json --most-words 22 \
      --output runs/questions.txt
"""
_LINE_BREAK: Final = re.compile(r"<br\s*/?>", re.IGNORECASE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    options = _parser().parse_args(arguments)
    return report_errors(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    sentences = list(dict.fromkeys(_sentences(options)))
    limit = options.max_sentences
    if limit is not None and limit < len(sentences):
        sentences = random.Random(options.seed).sample(sentences, limit)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(options.output, ("\n".join(sentences) + "\n").encode())
    print(f"{options.output}: {len(sentences):,} sentences")
    return 0


def _sentences(options: argparse.Namespace) -> Iterator[str]:
    for document in progress(_documents(options.documents), title="splitting", unit="documents"):
        for sentence in split_sentences(_LINE_BREAK.sub("\n", document)):
            if options.least_words <= len(sentence.split()) <= options.most_words:
                yield sentence


def _documents(paths: Sequence[Path]) -> Iterator[str]:
    questions = [path for path in paths if ".json" in path.suffixes]
    for question in read_squad(questions) if questions else ():
        yield question.question
        yield question.context
    if documents := [path for path in paths if path not in questions]:
        yield from read_documents(find_files(documents))


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("python -m recipes.albert_small_en.sentences", __doc__, _EXAMPLES)
    add = parser.add_argument
    add("documents", type=Path, nargs="+", help="SQuAD, JSONL, Parquet or text files, or folders")
    add("--output", type=Path, required=True, help="text file")
    add("--least-words", type=int, default=4, help="of a sentence (%(default)s)")
    add("--most-words", type=int, default=60, help="of a sentence (%(default)s)")
    add("--max-sentences", type=parse_count, help="maximum sentences, drawn at random (all)")
    add("--seed", type=int, default=0, help="of that draw (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
