"""Text as ALBERT's original code and SentencePiece read it."""

from __future__ import annotations

import unicodedata


def preprocess_text(text: str, *, lower: bool, keep_accents: bool = False) -> str:
    """`preprocess_text` of google-research/albert, with the quotes and accents of `transformers`.

    It drops the characters whose combining class is not zero, which vowel signs are not.
    """
    text = " ".join(text.strip().split()).replace("``", '"').replace("''", '"')
    if not keep_accents:
        text = unicodedata.normalize("NFKD", text)
        text = "".join(char for char in text if not unicodedata.combining(char))
    return text.lower() if lower else text
