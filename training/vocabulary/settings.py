"""Settings of a vocabulary in `tokenizer_config.json`, and errors of vocabularies."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from albert_serve.files import read_small_file
from albert_serve.tokenizer import SPECIAL_NAMES
from training.errors import TrainingError

CONFIG_FILE: Final = "tokenizer_config.json"
_MAX_BYTES: Final = 16 << 20
_FLAGS: Final = ("do_lower_case", "keep_accents", "strip_accents", "tokenize_chinese_chars")


class VocabError(TrainingError):
    """A vocabulary that cannot be trained, or whose original ids cannot be reproduced."""


class TooFewPiecesError(VocabError):
    """A vocabulary with fewer pieces than its text has characters.

    Attributes:
        required: minimum number of pieces.
    """

    def __init__(self, message: str, required: int) -> None:
        super().__init__(message)
        self.required = required


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabularySettings:
    """Settings of a tokenizer, by their names in `transformers`, or None if the file omits them.

    Attributes:
        tokenizer_class: name of the class in `transformers`, without "Fast".
        special: names of the special tokens in the file, by their role in `SPECIAL_NAMES`.
    """

    tokenizer_class: str | None = None
    do_lower_case: bool | None = None
    keep_accents: bool | None = None
    strip_accents: bool | None = None
    tokenize_chinese_chars: bool | None = None
    special: dict[str, str] = field(default_factory=dict)


def read_settings(folder: Path) -> VocabularySettings:
    """Read `tokenizer_config.json`. Without this file, all settings are None."""
    file = folder / CONFIG_FILE
    if not file.is_file():
        return VocabularySettings()
    try:
        content = json.loads(read_small_file(file, _MAX_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise VocabError(f"{file} cannot be read: {error}.") from error
    if not isinstance(content, dict):
        raise VocabError(f"{file} is not a JSON object.")
    flags = {name: content.get(name) for name in _FLAGS}
    for flag, value in flags.items():
        if value is not None and not isinstance(value, bool):
            raise VocabError(f"{file}: {flag} is {value!r}. Set it to true or false.")
    tokenizer_class = _name(content.get("tokenizer_class"))
    return VocabularySettings(
        tokenizer_class=tokenizer_class and tokenizer_class.removesuffix("Fast"),
        special={
            role: token
            for role in SPECIAL_NAMES
            if (token := _name(content.get(f"{role}_token"))) is not None
        },
        **flags,
    )


def _name(token: Any) -> str | None:
    """Return the name of a token, which `transformers` may have written as an object."""
    name = token.get("content") if isinstance(token, dict) else token
    return name if isinstance(name, str) else None
