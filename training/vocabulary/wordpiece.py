"""The tokenizer of a `vocab.txt`, like transformers' `BertTokenizer`."""

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
    """Build the tokenizer of a WordPiece vocabulary.

    Args:
        vocabulary: file with one piece per line. A piece's id is its line number, counted from 0.
        settings: settings in `tokenizer_config.json` (`do_lower_case` is true by default).
    """
    from transformers import BertTokenizer  # Importing transformers is slow.

    if settings.tokenizer_class not in _CLASSES:
        raise VocabError(
            f"{vocabulary} belongs to a {settings.tokenizer_class}, which does not split text like "
            "BertTokenizer. Add the tokenizer.json that save_pretrained of a fast tokenizer writes."
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
    """Check that pieces are distinct and include the special tokens.

    `BertTokenizer` would assign additional ids to missing pieces.
    """
    try:
        lines = vocabulary.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise VocabError(f"{vocabulary} cannot be read: {error}.") from error
    ids = {piece: index for index, piece in enumerate(lines)}
    if len(ids) < len(lines):
        duplicate = next(piece for index, piece in enumerate(lines) if ids[piece] != index)
        raise VocabError(f"{vocabulary} contains {duplicate!r} twice. Each id needs its own piece.")
    if missing := [name for name in special if name not in ids]:
        raise VocabError(
            f"{vocabulary} has no {' nor '.join(missing)}. Set the names of its special tokens in "
            "tokenizer_config.json (cls_token, sep_token, mask_token, unk_token, pad_token)."
        )
