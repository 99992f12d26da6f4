"""Examples of a finetuning run, cut as --length and --truncation say."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TypeVar

from albert_serve.tokenizer import AlbertTokenizer

_Text = TypeVar("_Text")
_Example = TypeVar("_Example")


def tokenise(
    options: argparse.Namespace,
    tokenizer: AlbertTokenizer,
    texts: Sequence[_Text],
    make: Callable[..., tuple[Sequence[_Example], int]],
    title: str,
) -> Sequence[_Example]:
    """Tokenise texts, and report how many were cut.

    Args:
        make: `labelled_examples` or `choice_examples`.
        title: the name of what is tokenised.

    Raises:
        CorpusError: texts are too long, and may not be cut.
    """
    examples, num_cut = make(texts, tokenizer, length=options.length, truncation=options.truncation)
    if num_cut:
        print(f"{num_cut:,} of {len(texts):,} {title} are cut to {options.length} tokens")
    return examples
