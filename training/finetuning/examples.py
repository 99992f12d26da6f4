"""Examples of a finetuning run, cut as --length and --truncation say."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from albert_serve.tokenizer import AlbertTokenizer
from training.data.labelled.errors import collecting, raise_listed

_Text = TypeVar("_Text")
_Example = TypeVar("_Example")


def tokenise_splits(
    options: argparse.Namespace,
    tokenizer: AlbertTokenizer,
    texts: Mapping[str, Sequence[_Text]],
    make: Callable[..., tuple[Sequence[_Example], int]],
    title: str,
    errors: Sequence[str] = (),
) -> dict[str, Sequence[_Example]]:
    """Tokenise the texts of each split, and report how many were cut.

    Args:
        make: `labelled_examples` or `choice_examples`.
        title: the name of what is tokenised.
        errors: of the data, which are raised with those of texts that are too long.

    Raises:
        CorpusError: there are errors, or texts are too long and may not be cut.
    """
    every = list(errors)
    if options.truncation:
        raise_listed(every)
    examples: dict[str, Sequence[_Example]] = {}
    for split, its_texts in texts.items():
        with collecting(every):
            examples[split] = _tokenise(options, tokenizer, its_texts, make, title)
    raise_listed(every)
    return examples


def _tokenise(
    options: argparse.Namespace,
    tokenizer: AlbertTokenizer,
    texts: Sequence[_Text],
    make: Callable[..., tuple[Sequence[_Example], int]],
    title: str,
) -> Sequence[_Example]:
    examples, num_cut = make(texts, tokenizer, length=options.length, truncation=options.truncation)
    if num_cut:
        print(f"{num_cut:,} of {len(texts):,} {title} are cut to {options.length} tokens")
    return examples
