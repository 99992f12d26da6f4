"""The tokenizer gives the ids of SentencePiece, and offsets into the original text."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import transformers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from albert_serve.errors import BundleCorruptError, InvalidInputError, TextTooLongError
from albert_serve.tokenizer import MAX_TOKENS, SPECIAL_TOKENS, AlbertTokenizer
from tests.training.vocabulary.oracle import preprocess_text

# Text that tokenizers often treat differently: special and user-defined tokens, quotes,
# expansions, white space, and characters that normalisation drops, merges or replaces by a space.
FRAGMENTS = (
    *SPECIAL_TOKENS,
    *("(", ")", '"', "``", "''", "'", "-", "–", ".", "£", "5.5", "U.S.", "9,"),
    *("é", "e\u0301", "\u0301", "ﬁ", "½", "…", "ⅷ", "İ", "ß"),
    *("日本語", "한국어", "👩‍👩‍👧", "🇩🇪", "▁"),
    *(" ", "  ", "\n", "\t", "\r\n", "\u00a0", "\u3000", "\u200b", "\u200d", "\ufeff", "\x00"),
    *("the", "School", "tor"),
)
TEXTS = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=4), max_size=10).map("".join)
many_texts = settings(deadline=None, max_examples=200)


@pytest.fixture(scope="module")
def spiece(checkpoint_dir: Path) -> Any:
    return sentencepiece.SentencePieceProcessor(model_file=str(checkpoint_dir / "spiece.model"))


@pytest.fixture(scope="module")
def hf_tokenizer(checkpoint_dir: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(checkpoint_dir)


@pytest.fixture
def tokenizer_json(checkpoint_dir: Path) -> dict[str, Any]:
    """The content of the tokenizer file, for changes."""
    content: dict[str, Any] = json.loads((checkpoint_dir / "tokenizer.json").read_text())
    return content


@many_texts
@given(TEXTS)
def test_any_unicode_gets_the_ids_of_sentencepiece(
    tokenizer: AlbertTokenizer, spiece: Any, text: str
) -> None:
    """SentencePiece reads special tokens as text, so the texts have none.

    The oracle normalises texts with ALBERT's original code.
    """
    assume(not any(token in text for token in SPECIAL_TOKENS))
    assert tokenizer.encode_plain(text).ids == spiece.encode(preprocess_text(text, lower=True))


@many_texts
@given(TEXTS, st.none() | TEXTS.filter(bool))
def test_any_unicode_gets_the_ids_of_transformers(
    tokenizer: AlbertTokenizer, hf_tokenizer: Any, text: str, pair: str | None
) -> None:
    encoding = tokenizer.encode(text, pair)
    hf_encoding = hf_tokenizer(text, pair, return_token_type_ids=True)
    assert encoding.ids == hf_encoding["input_ids"]
    assert encoding.types == hf_encoding["token_type_ids"]


@many_texts
@given(TEXTS)
def test_offsets_equal_transformers_but_include_combining_marks_after_a_token(
    tokenizer: AlbertTokenizer, hf_tokenizer: Any, text: str
) -> None:
    hf_encoding = hf_tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    hf_offsets = hf_encoding["offset_mapping"]
    offsets = tokenizer.encode_plain(text).offsets
    for (start, end), (hf_start, hf_end) in zip(offsets, hf_offsets, strict=True):
        word = text[hf_start:hf_end].strip()
        assert hf_start <= start < end
        assert text[start:end].startswith(word)
        assert all(is_mark(char) for char in text[max(hf_end, start + 1) : end])
        is_in_token = any(other_start <= end < other_end for other_start, other_end in offsets)
        assert is_in_token or not is_mark(text[end : end + 1])


def is_mark(char: str) -> bool:
    return bool(char) and unicodedata.category(char).startswith("M")


def test_truncation_and_padding_in_a_tokenizer_file_are_ignored(checkpoint_dir: Path) -> None:
    hf_tokenizer = Tokenizer.from_file(str(checkpoint_dir / "tokenizer.json"))
    hf_tokenizer.enable_truncation(8)
    hf_tokenizer.enable_padding(length=64)
    tokenizer = AlbertTokenizer(hf_tokenizer)
    assert len(tokenizer.encode_plain("[MASK] " * 3000)) == 3000
    assert tokenizer.encode("").ids == [2, 3]


def test_a_lone_surrogate_is_rejected_with_its_position(tokenizer: AlbertTokenizer) -> None:
    with pytest.raises(InvalidInputError, match=r"Character 4 .* U\+D83D"):
        tokenizer.encode("the", "the \ud83d tor")


def test_tokens_and_normalised_characters_of_a_text_have_limits(tokenizer: AlbertTokenizer) -> None:
    text = "[MASK]" * MAX_TOKENS
    assert len(tokenizer.encode_plain(text)) == MAX_TOKENS == 1 << 19
    with pytest.raises(TextTooLongError, match=f"{MAX_TOKENS + 1} tokens.* at most {MAX_TOKENS}"):
        tokenizer.encode_plain(f"{text}[MASK]")
    with pytest.raises(TextTooLongError, match=r"140001 characters.* 1500001.* at most 1500000"):
        tokenizer.encode_plain("\ufdfa" * 80_000 + "a" * 60_001)


def test_the_offsets_of_a_mask_exclude_the_space_before_it(tokenizer_json: dict[str, Any]) -> None:
    """In the released checkpoints, the mask token has `lstrip`."""
    tokenizer_json["added_tokens"][4]["lstrip"] = True
    tokenizer = AlbertTokenizer(Tokenizer.from_str(json.dumps(tokenizer_json)))
    encoding = tokenizer.encode_plain("the  [MASK] tor")
    assert encoding.offsets[encoding.ids.index(tokenizer.mask_id)] == (5, 11)


def test_a_tokenizer_needs_a_mask_token(tokenizer_json: dict[str, Any], tmp_path: Path) -> None:
    vocab, added_tokens = tokenizer_json["model"]["vocab"], tokenizer_json["added_tokens"]
    vocab[4][0] = added_tokens[4]["content"] = "[M]"
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(tokenizer_json))
    with pytest.raises(BundleCorruptError, match=r"no token \[MASK\] or <mask>"):
        AlbertTokenizer.from_file(file)
