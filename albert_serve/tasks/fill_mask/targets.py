"""The targets of a fill-mask request as ids of the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from albert_serve.api.wire import shorten
from albert_serve.errors import InvalidInputError
from albert_serve.tokenizer import AlbertTokenizer

_MAX_WARNINGS: Final = 20
# Targets that stay known: all texts of a request have the same, which so are read once. Few, for
# their tokenizers stay with them.
_NUM_KNOWN: Final = 8


@lru_cache(_NUM_KNOWN)
def read_first_pieces(
    tokenizer: AlbertTokenizer, targets: tuple[str, ...]
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """One id for each target, each id once, as `transformers`' pipeline chooses them.

    A target that is a piece of the vocabulary, as that writes it, is that piece; any other one
    stands for its first piece, and is passed over if it has none.

    Returns:
        The ids, in the targets' order, and what the caller should know of them.

    Raises:
        InvalidInputError: none of them stands for any token.
    """
    ids: dict[int, None] = {}
    warnings: list[str] = []
    for target in targets:
        token = tokenizer.token_id(target)
        pieces = tokenizer.encode_plain(target).ids
        if token is None:
            warnings.append(_explain(tokenizer, target, pieces))
            token = pieces[0] if pieces else None
        if token is not None:
            ids[token] = None
    if not ids:
        raise InvalidInputError(
            "none of the targets stands for any token; name words that a mask could stand for"
        )
    if len(warnings) > _MAX_WARNINGS:  # they travel in a header, which has a limit
        rest = f"and so for {len(warnings) - _MAX_WARNINGS} further targets"
        warnings = [*warnings[:_MAX_WARNINGS], rest]
    return np.array(list(ids), dtype=np.int64), tuple(warnings)


def _explain(tokenizer: AlbertTokenizer, target: str, pieces: Sequence[int]) -> str:
    missing = f"the target {shorten(target)} is not in the vocabulary"
    if not pieces:
        return f"{missing} and stands for nothing; it was passed over"
    first = tokenizer.token(pieces[0])
    # The space before a word, which alone says nothing of it.
    telling = next((name for name in map(tokenizer.token, pieces) if name != "▁"), "<unk>")
    warning = f"{missing}; its first piece {first!r} was scored"
    return f"{warning}, which says nothing of it" if telling == "<unk>" else warning


@lru_cache(_NUM_KNOWN)
def read_whole(tokenizer: AlbertTokenizer, targets: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """All pieces of each target, each target once, in their order.

    Raises:
        InvalidInputError: a target has none, or one that the vocabulary does not know.
    """
    found: dict[tuple[int, ...], None] = {}
    for target in targets:
        token = tokenizer.token_id(target)
        pieces = (token,) if token is not None else tuple(tokenizer.encode_plain(target).ids)
        if not pieces:
            raise InvalidInputError(
                f"the target {shorten(target)} stands for nothing; leave it out"
            )
        if token is None and "<unk>" in map(tokenizer.token, pieces):
            raise InvalidInputError(
                f"the target {shorten(target)} holds a character that the vocabulary does not "
                "know; leave it out or choose another word"
            )
        found[pieces] = None
    return tuple(found)
