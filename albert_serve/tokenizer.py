"""Text to token ids, with the character range of each token.

The module uses only the `tokenizers` library, and reads a `tokenizer.json` of any of its models.
The ids equal SentencePiece's or BERT's WordPiece's, whatever the ids of the special tokens. Offsets
count Python code points of the original text, before normalisation: `text[start:end]` is the text
of a token, without the space before it.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Final

from tokenizers import Encoding as RawEncoding
from tokenizers import Tokenizer
from tokenizers.models import BPE, Unigram

from albert_serve.errors import (
    BundleCorruptError,
    BundleMissingError,
    InvalidInputError,
    TextTooLongError,
)

# Training gives these tokens the ids 0 to 4, in this order.
SPECIAL_TOKENS: Final = ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]")
# In any vocabulary, a special token has the first of these names that exists.
SPECIAL_NAMES: Final[dict[str, tuple[str, ...]]] = {
    "pad": ("<pad>", "[PAD]"),
    "unk": ("<unk>", "[UNK]"),
    "cls": ("[CLS]", "<cls>", "<s>"),
    "sep": ("[SEP]", "<sep>", "</s>"),
    "mask": ("[MASK]", "<mask>"),
}
# SentencePiece and byte-level BPE mark the space before a piece with these characters.
_SPACE_MARKS: Final = ("▁", "Ġ")
# A text has at most this many tokens. A million characters of English have half of that.
MAX_TOKENS: Final = 1 << 19
# Normalisation may replace a character with up to 18 (U+FDFA), and so make a short text long.
_MAX_NORMALISED_CHARS: Final = 1_500_000
_MAX_EXPANSION: Final = 18
_MAX_CACHED_WORDS: Final = 10_000
# These compose with the previous letter: vowels and finals of Hangul, half-width voicing marks.
_COMPOSED: Final = re.compile("[\u1160-\u11ff\ud7b0-\ud7ff\uff9e\uff9f]")


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """The tokens of a text or pair. All lists have one entry per token.

    Attributes:
        ids: token ids.
        types: token type ids: 0 up to the first [SEP], then 1, or 0 if the tokenizer specifies it.
        locate: function that computes the offsets. This takes a third of the time of tokenising,
            and few tasks need offsets.
    """

    ids: list[int]
    types: list[int]
    locate: Callable[[], list[tuple[int, int]]] = field(repr=False, compare=False)

    @cached_property
    def offsets(self) -> list[tuple[int, int]]:
        """The character range of each token in its text, end excluded.

        The range is (0, 0) for [CLS] and [SEP] around the texts. Several tokens may share
        characters ("½" is three tokens of one character).
        """
        return self.locate()

    def __len__(self) -> int:
        return len(self.ids)

    def slice(self, start: int, stop: int) -> Encoding:
        """Return the tokens from `start` to before `stop`, with unchanged offsets."""
        return Encoding(
            ids=self.ids[start:stop],
            types=self.types[start:stop],
            locate=lambda: self.offsets[start:stop],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecialIds:
    """The ids of special tokens (default: the ids of `SPECIAL_TOKENS`).

    Attributes:
        all_ids: ids of all special tokens, which belong to no word.
    """

    cls: int = 2
    sep: int = 3
    mask: int = 4
    all_ids: frozenset[int] = frozenset(range(len(SPECIAL_TOKENS)))


ALBERT_IDS: Final = SpecialIds()


class AlbertTokenizer:
    """An encoder and decoder of texts, which threads can share.

    `[CLS]` begins every encoding, and `[SEP]` ends each of its texts.

    Attributes:
        vocab_size: V, the number of ids, which begin at 0.
        pad_id: id of the padding token, if the vocabulary has this token.
        unk_id: id of the token for unknown characters, if the vocabulary has this token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Wrap a tokenizer of any model that has ALBERT's special tokens, with any ids."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        _check_ids(tokenizer)
        self._tokenizer = tokenizer
        self.vocab_size: int = tokenizer.get_vocab_size()
        self.pad_id, self.unk_id = _find(tokenizer, "pad"), _find(tokenizer, "unk")
        self.cls_id, self.sep_id = _find_ends(tokenizer)
        self.mask_id = _require(tokenizer, "mask")
        self.mask_token = self.token(self.mask_id)
        if self._encode(self.mask_token).ids != [self.mask_id]:
            raise BundleCorruptError(
                f"{self.mask_token} in a text is not read as one token. Add it as a special token."
            )
        self._pair_type = pair_type(tokenizer)
        self._prefix: str = getattr(tokenizer.model, "continuing_subword_prefix", None) or ""
        self._space_mark = _space_mark(tokenizer)
        _fill_cache(tokenizer)

    @classmethod
    def from_file(cls, file: Path) -> AlbertTokenizer:
        """Read a `tokenizer.json`."""
        tokenizer = cls.read(file)
        try:
            return cls(tokenizer)
        except BundleCorruptError as error:
            raise BundleCorruptError(f"{file}: {error}") from error

    @staticmethod
    def read(file: Path) -> Tokenizer:
        """Read a `tokenizer.json` of any model."""
        try:
            content = file.read_text(encoding="utf-8")
        except OSError as error:
            raise BundleMissingError(f"{file} cannot be read: {error.strerror}.") from error
        except UnicodeDecodeError as error:
            raise BundleCorruptError(f"{file} is not UTF-8: {error}.") from error
        try:
            return Tokenizer.from_str(content)
        except Exception as error:  # the library raises no narrower type
            raise BundleCorruptError(f"{file} is not a tokenizer: {error}.") from error

    def encode(self, text: str, pair: str | None = None) -> Encoding:
        """Encode `[CLS] text [SEP]` or `[CLS] text [SEP] pair [SEP]`, without truncation."""
        second = None if pair is None else self.encode_plain(pair)
        return self.build(self.encode_plain(text), second)

    def encode_plain(
        self, text: str, check_length: Callable[[int], None] | None = None
    ) -> Encoding:
        """Encode a text without [CLS] and [SEP], with type 0 and without truncation.

        Args:
            text: text to encode.
            check_length: function of the number of tokens, which may raise. Rejecting a text here
                is cheap, because the lists of an `Encoding` are not made yet.
        """
        _check_text(text)
        encoded = self._encode(text)
        num_tokens = len(encoded)
        if num_tokens > MAX_TOKENS:
            raise TextTooLongError(
                f"The text has {num_tokens} tokens; at most {MAX_TOKENS} are allowed. Split it."
            )
        if check_length is not None:
            check_length(num_tokens)
        return Encoding(
            ids=encoded.ids,
            types=[0] * num_tokens,
            locate=lambda: _fit_ranges(text, encoded.offsets),
        )

    def _encode(self, text: str) -> RawEncoding:
        try:
            # Only batch encoding releases the GIL.
            (encoded,) = self._tokenizer.encode_batch([text], add_special_tokens=False)
        except BaseException as error:  # the library's panic is not an Exception
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise InvalidInputError(
                f"The model's tokenizer.json cannot tokenise this text: {error}. Fix the file: a "
                "regular expression may backtrack too often, or the unknown token is missing."
            ) from error
        return encoded

    def build(self, first: Encoding, second: Encoding | None = None) -> Encoding:
        """Add [CLS] and [SEP] to encodings without special tokens."""
        built = Encoding(
            ids=[self.cls_id, *first.ids, self.sep_id],
            types=[0] * (len(first) + 2),
            locate=lambda: [(0, 0), *first.offsets, (0, 0)],
        )
        if second is None:
            return built
        return Encoding(
            ids=[*built.ids, *second.ids, self.sep_id],
            types=[*built.types, *[self._pair_type] * (len(second) + 1)],
            locate=lambda: [*built.offsets, *second.offsets, (0, 0)],
        )

    @property
    def special(self) -> SpecialIds:
        """The ids of the special tokens."""
        ids = (self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id)
        added = self._tokenizer.get_added_tokens_decoder().items()
        return SpecialIds(
            cls=self.cls_id,
            sep=self.sep_id,
            mask=self.mask_id,
            all_ids=frozenset(token_id for token_id in ids if token_id is not None)
            | {token_id for token_id, token in added if token.special},
        )

    def begins_word(self, piece: str) -> bool:
        """Return whether a piece begins a word, or true if the vocabulary does not mark this."""
        if self._prefix:
            return not piece.startswith(self._prefix)
        return piece.startswith(self._space_mark)

    def surface(self, piece: str) -> str:
        """Return a piece's characters, without the notation for the beginning of a word."""
        if self._prefix:
            return piece.removeprefix(self._prefix)
        return piece.replace(self._space_mark, "") if self._space_mark else piece

    def token(self, token_id: int) -> str:
        """Return the piece of an id in the vocabulary's notation.

        In this notation, "▁" is the space before a word, or "##" begins a piece within a word.
        """
        piece = self._tokenizer.id_to_token(token_id) if token_id >= 0 else None
        if piece is None:
            raise IndexError(
                f"There is no token with the id {token_id}. Use ids below {self.vocab_size}."
            )
        return piece

    def token_id(self, token: str) -> int | None:
        """Return the id of a piece in the vocabulary's notation, or None if it is unknown."""
        return self._tokenizer.token_to_id(token)

    def decode(self, ids: Sequence[int], *, keep_special: bool) -> str:
        """Decode ids to text, with or without the special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=not keep_special)


def _check_ids(tokenizer: Tokenizer) -> None:
    ids = set(tokenizer.get_vocab().values())
    if ids != set(range(tokenizer.get_vocab_size())):
        raise BundleCorruptError(
            f"{len(ids)} tokens have ids up to {max(ids, default=0)}. Give each id its own token."
        )


def _find(tokenizer: Tokenizer, role: str) -> int | None:
    ids = map(tokenizer.token_to_id, SPECIAL_NAMES[role])
    return next((token_id for token_id in ids if token_id is not None), None)


def _require(tokenizer: Tokenizer, role: str) -> int:
    token_id = _find(tokenizer, role)
    if token_id is None:
        raise BundleCorruptError(
            f"The vocabulary has no token {' or '.join(SPECIAL_NAMES[role])}. Add this token."
        )
    return token_id


def _find_ends(tokenizer: Tokenizer) -> tuple[int, int]:
    """Return the ids of [CLS] and [SEP], from the two tokens around a text, or else by name."""
    special_ids = tokenizer.encode("").ids
    if len(special_ids) == 2:
        return special_ids[0], special_ids[1]
    return _require(tokenizer, "cls"), _require(tokenizer, "sep")


def pair_type(tokenizer: Tokenizer) -> int:
    """Return the token type of the second text of a pair (default: 1)."""
    return max(tokenizer.encode("", "").type_ids, default=1)


def _space_mark(tokenizer: Tokenizer) -> str:
    pieces = tokenizer.get_vocab()
    marks = (mark for mark in _SPACE_MARKS if any(piece.startswith(mark) for piece in pieces))
    return next(marks, "")


def _fill_cache(tokenizer: Tokenizer) -> None:
    """Fill the library's cache of words with the most frequent words of the vocabulary.

    The cache never drops a word. Otherwise, words of 250 letters in requests could fill it, which
    takes 14 kB per word and 140 MB in total.
    """
    if not isinstance(tokenizer.model, BPE | Unigram):
        return
    pieces = (tokenizer.id_to_token(index) for index in range(tokenizer.get_vocab_size()))
    words = [piece[1:] for piece in pieces if piece and piece.startswith("▁") and piece != "▁"]
    del words[_MAX_CACHED_WORDS:]
    tokenizer.model._resize_cache(len(words))
    tokenizer.encode(" ".join(words), add_special_tokens=False)


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInputError(
            f"Character {error.start} of the text is U+{ord(text[error.start]):04X}, half of a "
            "surrogate pair. Send complete characters."
        ) from error
    if len(text) * _MAX_EXPANSION <= _MAX_NORMALISED_CHARS or text.isascii():
        return
    # Normalising the text at once would take quadratic time for consecutive marks.
    num_chars = sum(
        count * len(unicodedata.normalize("NFKC", character))
        for character, count in Counter(text).items()
    )
    if num_chars > _MAX_NORMALISED_CHARS:
        raise TextTooLongError(
            f"The text of {len(text)} characters has {num_chars} characters after normalisation; "
            f"at most {_MAX_NORMALISED_CHARS} are allowed. Split it."
        )


def _fit_ranges(text: str, offsets: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return offsets without surrounding white space, and with the marks after the last character.

    Normalisation drops accents, and the library gives a composed character only the range of its
    first part. Without this function, "cafe" + U+0301 would end before its accent.
    """
    ranges = []
    limit = next_start = len(text)
    for start, end in reversed(offsets):
        if start < next_start:  # tokens that share a character have the same range
            limit, next_start = next_start, start
        ranges.append(_fit_range(text, start, end, limit))
    return ranges[::-1]


def _fit_range(text: str, start: int, end: int, limit: int) -> tuple[int, int]:
    while start < end - 1 and text[start].isspace():
        start += 1
    while start < end - 1 and text[end - 1].isspace():
        end -= 1
    while end < limit and _continues(text[end]):
        end += 1
    return start, end


def _continues(char: str) -> bool:
    """Return whether a character is a mark of the previous character, or composes with it."""
    return unicodedata.category(char).startswith("M") or _COMPOSED.match(char) is not None


# The Unicode names of characters in these scripts begin with these words.
_SPACELESS: Final = frozenset(
    ("CJK", "HIRAGANA", "KATAKANA", "HALFWIDTH", "BOPOMOFO", "THAI", "LAO", "KHMER", "MYANMAR",
     "TIBETAN")
)  # fmt: skip
_FIRST_SPACELESS: Final = "\u0e00"  # the first character of Thai


@cache
def is_spaceless(char: str) -> bool:
    """Return whether a character belongs to a script without spaces between words."""
    return char >= _FIRST_SPACELESS and unicodedata.name(char, "").split(" ")[0] in _SPACELESS


def word_bounds(text: str) -> tuple[list[int], list[int]]:
    """Return the start and end of each character's word, or of the character outside words.

    A word is a run of letters, marks and digits. In scripts without spaces between words, a word is
    one letter with its marks.
    """
    kinds = [unicodedata.category(character)[0] for character in text]
    is_alone = list(map(is_spaceless, text))
    continues_word = [
        kinds[i] in "LMN"
        and kinds[i - 1] in "LMN"
        and (kinds[i] == "M" or not (is_alone[i] or is_alone[i - 1]))
        for i in range(1, len(text))
    ]
    first = list(range(len(text)))
    last = list(range(1, len(text) + 1))
    for i, is_inside in enumerate(continues_word, start=1):
        if is_inside:
            first[i] = first[i - 1]
    for i in range(len(text) - 2, -1, -1):
        if continues_word[i]:
            last[i] = last[i + 1]
    return first, last
