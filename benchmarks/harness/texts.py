"""Texts drawn from files, once for all contestants."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

from tokenizers import Tokenizer

from benchmarks.harness.process import REPOSITORY, BenchmarkError
from training.data.corpus import find_files, read_documents

# A few Wikipedia articles that are in the repository.
WIKI: Final = REPOSITORY / "tests" / "data" / "wiki.jsonl"
_MIN_TOKENS: Final = 8
# Number of candidates per drawn text. With one, the sample would be the start of the file.
_CANDIDATES: Final = 8
_SEED: Final = 0


class Text(NamedTuple):
    """A text and its token ids, including special tokens."""

    text: str
    ids: list[int]


def draw_texts(
    files: Sequence[Path], tokenizer: Tokenizer, num_texts: int, max_tokens: int
) -> list[Text]:
    """Draw texts of 8 to `max_tokens` tokens, in random order. Equal files give equal texts.

    Longer texts are split into paragraphs.

    Raises:
        CorpusError: a file cannot be read.
        BenchmarkError: no text has such a length.
    """
    tokenizer.no_truncation()
    tokenizer.no_padding()
    pieces = _pieces_within(read_documents(find_files(files)), tokenizer, max_tokens)
    candidates = list(islice(pieces, _CANDIDATES * num_texts))
    if not candidates:
        raise BenchmarkError(
            f"There is no text of {_MIN_TOKENS} to {max_tokens} tokens in "
            f"{', '.join(map(str, files))}. Choose other files with --texts."
        )
    return random.Random(_SEED).sample(candidates, min(num_texts, len(candidates)))


def _pieces_within(
    documents: Iterable[str], tokenizer: Tokenizer, max_tokens: int
) -> Iterator[Text]:
    for document in documents:
        document_ids = tokenizer.encode(document).ids
        parts = [document] if len(document_ids) <= max_tokens else document.split("\n")
        for part in parts:
            ids = document_ids if part is document else tokenizer.encode(part).ids
            if _MIN_TOKENS <= len(ids) <= max_tokens:
                yield Text(part, ids)
