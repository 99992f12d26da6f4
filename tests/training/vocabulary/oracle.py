"""The normalisation of text in ALBERT's original code."""

from __future__ import annotations

import unicodedata


def preprocess_text(text: str, *, lower: bool, keep_accents: bool = False) -> str:
    """Normalise text like google-research/albert, with the quotes and accents of `transformers`.

    Characters with a combining class other than zero are removed. Vowel signs have class zero.
    """
    text = " ".join(text.strip().split()).replace("``", '"').replace("''", '"')
    if not keep_accents:
        text = unicodedata.normalize("NFKD", text)
        text = "".join(char for char in text if not unicodedata.combining(char))
    return text.lower() if lower else text
