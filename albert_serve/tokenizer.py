"""Text to token ids, with the characters that each token came from.

Stands on the `tokenizers` library alone. The ids are those of SentencePiece itself, and of
`transformers.AutoTokenizer` on a folder that holds the same `tokenizer.json`.
Offsets count Python code points of the text as it was given, whatever normalisation made of it:
`text[start:end]` is what the token stands for, without the space before it.
"""

from __future__ import annotations

import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer
from tokenizers.models import Unigram

from albert_serve.errors import (
    BundleCorruptError,
    BundleMissingError,
    InvalidInputError,
    TextTooLongError,
)

# In order of their ids, 0 to 4, which every ALBERT vocabulary has.
SPECIAL_TOKENS: Final = ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]")
# Of one text. English of a million characters has half as many.
MAX_TOKENS: Final = 1 << 19
# One character may stand for up to 18, as U+FDFA does: a text that is small is a large one then.
_MAX_NORMALISED_CHARS: Final = 1_500_000
_MAX_EXPANSION: Final = 18
_MAX_CACHED_WORDS: Final = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoding:
    """The tokens of one text, or of a pair; all three lists have one entry a token.

    Attributes:
        ids: token ids.
        types: token type ids: 0 up to the first [SEP], 1 after it.
        offsets: the range of characters, end excluded, in the text that the token came from;
            (0, 0) for the [CLS] and [SEP] put around the texts. Two tokens may share characters
            ("½" is three tokens of one character).
    """

    ids: list[int]
    types: list[int]
    offsets: list[tuple[int, int]]

    def __len__(self) -> int:
        return len(self.ids)

    def slice(self, start: int, stop: int) -> Encoding:
        """Return the tokens from `start` to before `stop`; offsets stay the same."""
        return Encoding(
            ids=self.ids[start:stop],
            types=self.types[start:stop],
            offsets=self.offsets[start:stop],
        )


class AlbertTokenizer:
    """Encodes and decodes with one vocabulary. Safe to use from many threads.

    `[CLS]` begins every encoding, and `[SEP]` ends each of its texts.
    """

    pad_id, unk_id, cls_id, sep_id, mask_id = range(len(SPECIAL_TOKENS))
    mask_token = SPECIAL_TOKENS[mask_id]

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Take a tokenizer whose first five ids are ALBERT's special tokens.

        Raises:
            BundleCorruptError: they are not, or two ids have the same token.
        """
        tokenizer.no_truncation()
        tokenizer.no_padding()
        _check_vocabulary(tokenizer)
        self._tokenizer = tokenizer
        self.vocab_size: int = tokenizer.get_vocab_size()
        self._max_token_chars = max(map(len, tokenizer.get_vocab()))
        self._known_ascii = _known_ascii(tokenizer)
        _fill_cache(tokenizer)

    @classmethod
    def from_file(cls, file: Path) -> AlbertTokenizer:
        """Read a `tokenizer.json`.

        Raises:
            BundleMissingError: there is no such file.
            BundleCorruptError: it is not a tokenizer, or not one of an ALBERT.
        """
        try:
            content = file.read_text(encoding="utf-8")
        except OSError as error:
            raise BundleMissingError(f"{file} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise BundleCorruptError(f"{file} is not UTF-8: {error}") from error
        try:
            tokenizer = Tokenizer.from_str(content)
        except Exception as error:  # the library raises no narrower type
            raise BundleCorruptError(f"{file} is not a tokenizer: {error}") from error
        try:
            return cls(tokenizer)
        except BundleCorruptError as error:
            raise BundleCorruptError(f"{file}: {error}") from error

    def encode(self, text: str, pair: str | None = None) -> Encoding:
        """`[CLS] text [SEP]`, or `[CLS] text [SEP] pair [SEP]`; never truncated.

        Raises:
            InvalidInputError: a text holds half of a surrogate pair.
        """
        second = None if pair is None else self.encode_plain(pair)
        return self.build(self.encode_plain(text), second)

    def encode_plain(
        self, text: str, check_length: Callable[[int], None] | None = None
    ) -> Encoding:
        """The tokens of `text` alone, without [CLS] and [SEP], all of type 0; never truncated.

        Args:
            check_length: called with the number of tokens; raises if they are too many. To refuse
                a text here is cheap: the lists of an `Encoding` take Python, one thread at a time.

        Raises:
            InvalidInputError: the text holds half of a surrogate pair.
            TextTooLongError: it has more tokens than any task reads.
        """
        _check_text(text)
        # As a batch of one: only batch encoding releases the GIL.
        (encoded,) = self._tokenizer.encode_batch([text], add_special_tokens=False)
        num_tokens = len(encoded)
        if num_tokens > MAX_TOKENS:
            raise TextTooLongError(
                f"a text is {num_tokens} tokens; at most {MAX_TOKENS} are read: split it"
            )
        if check_length is not None:
            check_length(num_tokens)
        return Encoding(
            ids=encoded.ids,
            types=[0] * num_tokens,
            offsets=[_fit_range(text, start, end) for start, end in encoded.offsets],
        )

    def least_num_tokens(self, text: str) -> int:
        """Return a lower bound of a text's tokens by its length, without tokenising it.

        Each ASCII character that is a piece by itself is in some piece, and none is longer than the
        longest of the vocabulary. A character that is none may be part of an unknown token of any
        length, or vanish; and an accent may take the letter before it along.
        """
        ascii_only = text.encode("ascii", "ignore")
        num_known = len(ascii_only) - len(ascii_only.translate(None, self._known_ascii))
        num_others = len(text) - len(ascii_only)
        return max(0, num_known - num_others) // self._max_token_chars

    def build(self, first: Encoding, second: Encoding | None = None) -> Encoding:
        """Put [CLS] and [SEP] around plain encodings, or slices of them."""
        built = Encoding(
            ids=[self.cls_id, *first.ids, self.sep_id],
            types=[0] * (len(first) + 2),
            offsets=[(0, 0), *first.offsets, (0, 0)],
        )
        if second is None:
            return built
        return Encoding(
            ids=[*built.ids, *second.ids, self.sep_id],
            types=[*built.types, *[1] * (len(second) + 1)],
            offsets=[*built.offsets, *second.offsets, (0, 0)],
        )

    def token(self, token_id: int) -> str:
        """Return the piece of an id in the vocabulary's notation, "▁" for the space before a word.

        Raises:
            IndexError: the vocabulary has no such id.
        """
        piece = self._tokenizer.id_to_token(token_id) if token_id >= 0 else None
        if piece is None:
            raise IndexError(
                f"no token has the id {token_id}; they go from 0 to below {self.vocab_size}"
            )
        return piece

    def token_id(self, token: str) -> int | None:
        """Return the id of a piece in the vocabulary's notation; None if it has no such piece."""
        return self._tokenizer.token_to_id(token)

    def decode(self, ids: Sequence[int], *, keep_special: bool) -> str:
        """Decode ids to text, with or without the special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=not keep_special)


def _check_vocabulary(tokenizer: Tokenizer) -> None:
    first_ids = tuple(tokenizer.id_to_token(index) for index in range(len(SPECIAL_TOKENS)))
    if first_ids != SPECIAL_TOKENS:
        raise BundleCorruptError(
            f"ids 0 to 4 are {first_ids}; in an ALBERT they are {SPECIAL_TOKENS}"
        )
    ids = set(tokenizer.get_vocab().values())
    if ids != set(range(tokenizer.get_vocab_size())):
        raise BundleCorruptError(
            f"{len(ids)} tokens have ids up to {max(ids)}; each id needs a token of its own"
        )
    mask = AlbertTokenizer.mask_token
    if tokenizer.encode(mask, add_special_tokens=False).ids != [AlbertTokenizer.mask_id]:
        raise BundleCorruptError(
            "[MASK] in a text is not read as one token; is it a special token?"
        )


def _fill_cache(tokenizer: Tokenizer) -> None:
    """Fill the library's cache of words with the most frequent ones of the vocabulary.

    It keeps the first words that it sees for ever. Those of some requests, of 250 letters each,
    would be 14 kB a word, 140 MB in all.
    """
    if not isinstance(tokenizer.model, Unigram):
        return
    pieces = (tokenizer.id_to_token(index) for index in range(tokenizer.get_vocab_size()))
    words = [piece[1:] for piece in pieces if piece and piece.startswith("▁") and piece != "▁"]
    del words[_MAX_CACHED_WORDS:]
    tokenizer.model._resize_cache(len(words))
    tokenizer.encode(" ".join(words), add_special_tokens=False)


def _known_ascii(tokenizer: Tokenizer) -> bytes:
    """Return the ASCII letters and digits that normalisation keeps, and that are pieces."""
    normaliser = tokenizer.normalizer

    def piece(character: str) -> str:
        return normaliser.normalize_str(character) if normaliser else character

    known = [
        character
        for character in string.ascii_letters + string.digits
        if len(piece(character)) == 1 and tokenizer.token_to_id(piece(character)) is not None
    ]
    return "".join(known).encode()


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInputError(
            f"character {error.start} of the text is U+{ord(text[error.start]):04X}, half of a "
            "surrogate pair, which stands for no character; send whole characters"
        ) from error
    if len(text) * _MAX_EXPANSION <= _MAX_NORMALISED_CHARS or text.isascii():
        return
    # Character by character: to normalise a text takes the square of its marks in a row.
    num_chars = sum(
        number * len(unicodedata.normalize("NFKC", character))
        for character, number in Counter(text).items()
    )
    if num_chars > _MAX_NORMALISED_CHARS:
        raise TextTooLongError(
            f"a text of {len(text)} characters stands for {num_chars}, with those like U+FDFA "
            f"written out; at most {_MAX_NORMALISED_CHARS} are read: split it"
        )


def _fit_range(text: str, start: int, end: int) -> tuple[int, int]:
    """Return offsets without white space around, and with the accents of the last character.

    Normalisation drops accents, so that without this "cafe" + U+0301 would end before its accent.
    """
    while start < end - 1 and text[start].isspace():
        start += 1
    while start < end - 1 and text[end - 1].isspace():
        end -= 1
    while end < len(text) and unicodedata.category(text[end]).startswith("M"):
        end += 1
    return start, end
