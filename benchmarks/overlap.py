"""Contexts of questions that stand in a corpus: the share of each one's n-grams of words in it.

A model that was trained on the corpus has read such contexts before. Prints how many there are, and
with --output writes the questions on the others, in the same format, for `albert-serve evaluate`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from albert_serve.progress import progress
from recipes.albert_small_en.squad_file import write_squad_file
from training.data.corpus import CorpusError, find_files, read_documents, read_lines
from training.errors import report_errors
from training.options.values import parse_count, parse_part
from training.system.command_line import make_parser

_EXAMPLES: Final = r"""examples:
  python -m benchmarks.overlap --corpus wiki/train-*.jsonl.xz --questions dev-v1.1.json \
      --output runs/dev-apart.json.xz
  albert-serve evaluate models/albert-small-en --question-answering runs/dev-apart.json.xz
"""
_WORD: Final = re.compile(r"\w+")
# Of a polynomial hash in 64 bits, which wraps.
_BASE: Final = np.uint64(0x9E3779B97F4A7C15)


class NGrams:
    """Hashes of the n-grams of texts, in the words of some of them."""

    def __init__(self, num_words: int, texts: Sequence[str]) -> None:
        words = dict.fromkeys(word for text in texts for word in _WORD.findall(text.lower()))
        self._numbers = {word: number for number, word in enumerate(words, start=1)}
        self._num_words = num_words

    def hashes(self, text: str) -> NDArray[np.uint64]:
        """Return the hash of each n-gram of a text; other words count as one."""
        numbers = [self._numbers.get(word, 0) for word in _WORD.findall(text.lower())]
        count = max(0, len(numbers) - self._num_words + 1)
        hashes = np.zeros(count, np.uint64)
        for begin in range(self._num_words):
            hashes = hashes * _BASE + np.array(numbers[begin : begin + count], np.uint64)
        return hashes


def shares_in(texts: Sequence[str], corpus: Sequence[Path], num_words: int) -> list[float]:
    """Return the share of each text's n-grams that the corpus has; 0 of a text without any."""
    ngrams = NGrams(num_words, texts)
    of_texts = [np.unique(ngrams.hashes(text)) for text in texts]
    sought = np.unique(np.concatenate(of_texts))
    if not len(sought):
        return [0.0] * len(texts)
    is_shared = np.zeros(len(sought), bool)
    for document in progress(read_documents(corpus), title="reading the corpus", unit="documents"):
        hashes = ngrams.hashes(document)
        places = np.searchsorted(sought, hashes).clip(max=len(sought) - 1)
        is_shared[places[sought[places] == hashes]] = True
    shared = sought[is_shared]
    return [float(np.isin(each, shared).mean()) if len(each) else 0.0 for each in of_texts]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    options = _parser().parse_args(arguments)
    return report_errors(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    articles = _articles(options.questions)
    contexts = [each["context"] for article in articles for each in article["paragraphs"]]
    shares = shares_in(contexts, find_files(options.corpus), options.words)
    is_known = dict(zip(contexts, (share > options.share for share in shares), strict=True))
    num_known = sum(is_known[context] for context in contexts)
    in_articles = sum(
        any(is_known[each["context"]] for each in article["paragraphs"]) for article in articles
    )
    print(
        f"{num_known:,} of {len(contexts):,} contexts, in {in_articles} of {len(articles)} "
        f"articles, share over {options.share:.0%} of their {options.words}-grams with the corpus"
    )
    if options.output is not None:
        count = write_squad_file(
            options.output,
            "1.1",
            _apart(articles, is_known),
            if_none="no context is apart from the corpus",
        )
        print(f"{options.output}: {count:,} questions on the other contexts")
    return 0


def _articles(file: Path) -> list[dict[str, Any]]:
    """Return the articles of a SQuAD file, with all that it has."""
    try:
        articles: list[dict[str, Any]] = json.loads("".join(read_lines(file)))["data"]
        _ = [each["context"] for article in articles for each in article["paragraphs"]]
    except (ValueError, KeyError, TypeError) as error:
        raise CorpusError(f"{file} is not in SQuAD's format: {error!r}") from error
    return articles


def _apart(
    articles: Sequence[Mapping[str, Any]], is_known: Mapping[str, bool]
) -> Iterator[dict[str, Any]]:
    """Yield the articles with their other paragraphs."""
    for article in articles:
        others = [each for each in article["paragraphs"] if not is_known[each["context"]]]
        if others:
            yield {**article, "paragraphs": others}


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("python -m benchmarks.overlap", __doc__, _EXAMPLES)
    add = parser.add_argument
    add("--corpus", type=Path, nargs="+", required=True, help="that a model was trained on")
    add("--questions", type=Path, required=True, help="a SQuAD file")
    add("--output", type=Path, help="takes the questions on other contexts (.json, .json.xz)")
    add("--words", type=parse_count, default=8, help="of an n-gram (%(default)s)")
    share = "over which a context counts as one of the corpus (%(default)s)"
    add("--share", type=parse_part, default=0.5, help=share)
    return parser


if __name__ == "__main__":
    sys.exit(main())
