"""The tokenizer of a `vocab.txt`, as `BertTokenizer` of `transformers` reads it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from training.vocabulary.settings import VocabError, VocabularySettings

_CLASSES: Final = (None, "BertTokenizer", "AlbertTokenizer", "PreTrainedTokenizer",
                   "TokenizersBackend", "ElectraTokenizer")  # fmt: skip
_NAMES: Final = {
    "pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"
}  # fmt: skip


def build_wordpiece(vocabulary: Path, settings: VocabularySettings) -> Tokenizer:
    """Build the tokenizer of a WordPiece vocabulary: a piece per line, whose number is its id.

    Args:
        settings: of `tokenizer_config.json`; text is lower-cased unless it says otherwise.
    """
    from transformers import BertTokenizer  # slow to import

    if settings.tokenizer_class not in _CLASSES:
        raise VocabError(
            f"{vocabulary} belongs to a {settings.tokenizer_class}, which splits text differently; "
            "only BertTokenizer is built from a vocab.txt. Add the tokenizer.json that "
            "save_pretrained of transformers writes for a fast tokenizer"
        )
    special = _NAMES | settings.special
    _check(vocabulary, special.values())
    tokenizer: Tokenizer = BertTokenizer(
        vocab=str(vocabulary),
        do_lower_case=settings.do_lower_case is not False,
        tokenize_chinese_chars=settings.tokenize_chinese_chars is not False,
        strip_accents=settings.strip_accents,
        **{f"{role}_token": name for role, name in special.items()},
    ).backend_tokenizer
    return tokenizer


def _check(vocabulary: Path, special: Iterable[str]) -> None:
    """Check that each piece has one id, since `BertTokenizer` gives missing ones further ids."""
    try:
        lines = vocabulary.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise VocabError(f"{vocabulary} cannot be read: {error}") from error
    ids = {piece: index for index, piece in enumerate(lines)}
    if len(ids) < len(lines):
        twice = next(piece for index, piece in enumerate(lines) if ids[piece] != index)
        raise VocabError(f"{vocabulary} contains {twice!r} twice; each id needs a different piece")
    if missing := [name for name in special if name not in ids]:
        raise VocabError(
            f"{vocabulary} has no {' nor '.join(missing)}; name its special tokens in "
            "tokenizer_config.json (cls_token, sep_token, mask_token, unk_token, pad_token)"
        )
