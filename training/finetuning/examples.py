"""Examples of a finetuning run, cut as --length and --truncation say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

from albert_serve.tokenizer import AlbertTokenizer
from training.data.labelled.errors import collecting, raise_listed
from training.finetuning.settings import FinetuneSettings

# The splits of labelled data.
TRAINING: Final = "training"
VALIDATION: Final = "validation"
# Examples of a batch of validation.
VALIDATED_TOGETHER: Final = 64
_Text = TypeVar("_Text")
_Example = TypeVar("_Example")


def tokenise_splits(
    settings: FinetuneSettings,
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
    if settings.truncation:
        raise_listed(every)
    examples: dict[str, Sequence[_Example]] = {}
    for split, its_texts in texts.items():
        with collecting(every):
            examples[split] = _tokenise(settings, tokenizer, its_texts, make, title)
    raise_listed(every)
    return examples


def _tokenise(
    settings: FinetuneSettings,
    tokenizer: AlbertTokenizer,
    texts: Sequence[_Text],
    make: Callable[..., tuple[Sequence[_Example], int]],
    title: str,
) -> Sequence[_Example]:
    examples, num_cut = make(
        texts, tokenizer, length=settings.length, truncation=settings.truncation
    )
    if num_cut:
        print(f"{num_cut:,} of {len(texts):,} {title} are cut to {settings.length} tokens")
    return examples
