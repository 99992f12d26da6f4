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
# All texts of a request have the same targets, which are parsed once. The cache is small because
# its keys keep their tokenizers alive.
_CACHE_SIZE: Final = 8


@lru_cache(_CACHE_SIZE)
def read_first_pieces(
    tokenizer: AlbertTokenizer, targets: tuple[str, ...]
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Return one id for each target, without duplicates, as `transformers`' pipeline does.

    A target that is a piece of the vocabulary, in its notation, is that piece; any other target is
    represented by its first piece, and skipped if it has none.

    Returns:
        The ids, in the targets' order, and warnings for the caller.

    Raises:
        InvalidInputError: no target has any token.
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
    if len(warnings) > _MAX_WARNINGS:  # they are sent in a header, whose size is limited
        rest = f"and so for {len(warnings) - _MAX_WARNINGS} further targets"
        warnings = [*warnings[:_MAX_WARNINGS], rest]
    return np.array(list(ids), dtype=np.int64), tuple(warnings)


def _explain(tokenizer: AlbertTokenizer, target: str, pieces: Sequence[int]) -> str:
    missing = f"the target {shorten(target)} is not in the vocabulary"
    if not pieces:
        return f"{missing} and stands for nothing; it was passed over"
    first = tokenizer.token(pieces[0])
    # A lone "▁" is the space before a word, and does not identify it.
    telling = (piece for piece in pieces if tokenizer.surface(tokenizer.token(piece)))
    warning = f"{missing}; its first piece {first!r} was scored"
    is_unknown = next(telling, tokenizer.unk_id) == tokenizer.unk_id
    return f"{warning}, which says nothing of it" if is_unknown else warning


@lru_cache(_CACHE_SIZE)
def read_whole(tokenizer: AlbertTokenizer, targets: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Return all pieces of each target, without duplicates, in order.

    Raises:
        InvalidInputError: a target has no pieces, or an unknown one.
    """
    all_pieces: dict[tuple[int, ...], None] = {}
    for target in targets:
        token = tokenizer.token_id(target)
        pieces = (token,) if token is not None else tuple(tokenizer.encode_plain(target).ids)
        if not pieces:
            raise InvalidInputError(
                f"the target {shorten(target)} stands for nothing; leave it out"
            )
        if token is None and tokenizer.unk_id in pieces:
            raise InvalidInputError(
                f"the target {shorten(target)} holds a character that the vocabulary does not "
                "know; leave it out or choose another word"
            )
        all_pieces[pieces] = None
    return tuple(all_pieces)
