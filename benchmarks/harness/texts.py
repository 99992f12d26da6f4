"""Texts of files, drawn once for all contestants."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

from tokenizers import Tokenizer

from benchmarks.harness.process import REPOSITORY, BenchmarkError
from training.data.corpus import find_files, read_documents

# A few articles that lie here.
WIKI: Final = REPOSITORY / "tests" / "data" / "wiki.jsonl"
_LEAST_TOKENS: Final = 8
# Of the texts that are looked at, so that a draw is not the file's beginning.
_CANDIDATES: Final = 8
_SEED: Final = 0


class Text(NamedTuple):
    """A text and its ids, special ones included."""

    text: str
    ids: list[int]


def draw_texts(
    files: Sequence[Path], tokenizer: Tokenizer, num_texts: int, max_tokens: int
) -> list[Text]:
    """Draw texts of 8 to `max_tokens` tokens, in random order; the same files give the same.

    A text that is longer is taken by its paragraphs.

    Raises:
        CorpusError: a file cannot be read.
        BenchmarkError: there is no text of such a length.
    """
    tokenizer.no_truncation()
    tokenizer.no_padding()
    fitting = _fitting(read_documents(find_files(files)), tokenizer, max_tokens)
    candidates = list(islice(fitting, _CANDIDATES * num_texts))
    if not candidates:
        raise BenchmarkError(
            f"no text of {_LEAST_TOKENS} to {max_tokens} tokens in "
            f"{', '.join(map(str, files))}; name other files with --texts"
        )
    return random.Random(_SEED).sample(candidates, min(num_texts, len(candidates)))


def _fitting(documents: Iterable[str], tokenizer: Tokenizer, max_tokens: int) -> Iterator[Text]:
    for document in documents:
        whole = tokenizer.encode(document).ids
        parts = [document] if len(whole) <= max_tokens else document.split("\n")
        for part in parts:
            ids = whole if part is document else tokenizer.encode(part).ids
            if _LEAST_TOKENS <= len(ids) <= max_tokens:
                yield Text(part, ids)
