"""The tokenizer gives the ids of SentencePiece, and offsets into the text as it was given."""

from __future__ import annotations

import json
import shutil
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import transformers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from albert_serve.config import AlbertConfig
from albert_serve.errors import BundleCorruptError, InvalidInputError, TextTooLongError
from albert_serve.tokenizer import MAX_TOKENS, SPECIAL_TOKENS, AlbertTokenizer, Encoding
from tests.training.vocabulary.oracle import preprocess_text
from training.data.corpus import read_documents
from training.model.checkpoint import write_tokenizer_config
from training.vocabulary.spiece import build_tokenizer
from training.vocabulary.training import train_vocab

WIKI = Path(__file__).parents[1] / "data" / "wiki.jsonl"
PARAGRAPHS = [
    paragraph
    for document in read_documents([WIKI])
    for paragraph in document.split("\n")
    if paragraph.strip()
]
# Where tokenizers part ways: special and user-defined tokens, quotes, expansions, white space,
# characters that normalisation drops, merges or turns into a space.
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
def spiece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary of 1,000 pieces, alone in its folder."""
    return train_vocab(read_documents([WIKI]), tmp_path_factory.mktemp("spiece"), vocab_size=1000)


@pytest.fixture(scope="module")
def folder(spiece: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer files of a checkpoint."""
    folder = tmp_path_factory.mktemp("checkpoint")
    shutil.copy(spiece, folder)
    build_tokenizer(spiece).save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text('{"model_type": "albert"}')
    write_tokenizer_config(AlbertConfig(), folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> AlbertTokenizer:
    return AlbertTokenizer.from_file(folder / "tokenizer.json")


@pytest.fixture(scope="module")
def pieces_of(spiece: Path) -> Callable[[str], list[int]]:
    """SentencePiece itself, on text as ALBERT's original code normalises it."""
    model = sentencepiece.SentencePieceProcessor(model_file=str(spiece))

    def encode(text: str) -> list[int]:
        ids: list[int] = model.encode(preprocess_text(text, lower=True))
        return ids

    return encode


@pytest.fixture(scope="module")
def hf(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


def assert_same(ours: Encoding, hf: Any, *texts: str | None) -> None:
    theirs = hf(*texts, return_token_type_ids=True)
    assert ours.ids == theirs["input_ids"]
    assert ours.types == theirs["token_type_ids"]


@many_texts
@given(TEXTS)
def test_any_unicode_gets_the_ids_of_sentencepiece(
    tokenizer: AlbertTokenizer, pieces_of: Callable[[str], list[int]], text: str
) -> None:
    """But for special tokens, which it reads as text."""
    assume(not any(token in text for token in SPECIAL_TOKENS))
    assert tokenizer.encode_plain(text).ids == pieces_of(text)


@many_texts
@given(TEXTS, st.none() | TEXTS.filter(bool))
def test_any_unicode_gets_the_ids_of_transformers(
    tokenizer: AlbertTokenizer, hf: Any, text: str, pair: str | None
) -> None:
    assert_same(tokenizer.encode(text, pair), hf, text, pair)


@many_texts
@given(TEXTS)
def test_offsets_are_those_of_transformers_with_the_accents_after(
    tokenizer: AlbertTokenizer, hf: Any, text: str
) -> None:
    theirs = hf(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    for (start, end), (hf_start, hf_end) in zip(
        tokenizer.encode_plain(text).offsets, theirs, strict=True
    ):
        word = text[hf_start:hf_end].strip()
        assert hf_start <= start < end
        assert text[start:end].startswith(word)
        assert all(is_mark(char) for char in text[max(hf_end, start + 1) : end])
        is_other_token = any(begin == end for begin, _ in theirs)
        assert not is_mark(text[end : end + 1]) or is_other_token


def is_mark(char: str) -> bool:
    return bool(char) and unicodedata.category(char).startswith("M")


def test_the_truncation_and_padding_of_a_file_are_ignored(folder: Path, tmp_path: Path) -> None:
    raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
    raw.enable_truncation(8)
    raw.enable_padding(length=64)
    raw.save(str(tmp_path / "tokenizer.json"))
    tokenizer = AlbertTokenizer.from_file(tmp_path / "tokenizer.json")
    assert len(tokenizer.encode_plain("[MASK] " * 3000)) == 3000
    assert tokenizer.encode("").ids == [2, 3]


def test_half_a_surrogate_pair_is_rejected(tokenizer: AlbertTokenizer) -> None:
    with pytest.raises(InvalidInputError, match=r"Character 4 .* U\+D83D"):
        tokenizer.encode("the", "the \ud83d tor")


def test_a_text_has_limits_of_tokens_and_of_normalised_characters(
    tokenizer: AlbertTokenizer,
) -> None:
    text = "[MASK]" * MAX_TOKENS
    assert len(tokenizer.encode_plain(text)) == MAX_TOKENS == 1 << 19
    with pytest.raises(TextTooLongError, match=f"{MAX_TOKENS + 1} tokens.* at most {MAX_TOKENS}"):
        tokenizer.encode_plain(f"{text}[MASK]")
    with pytest.raises(TextTooLongError, match=r"140001 characters.* 1500001.* at most 1500000"):
        tokenizer.encode_plain("\ufdfa" * 80_000 + "a" * 60_001)


def test_a_mask_that_takes_the_space_before_has_offsets_without_it(folder: Path) -> None:
    """The `tokenizer.json` of the released checkpoints has such a mask."""
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"][4]["lstrip"] = True
    tokenizer = AlbertTokenizer(Tokenizer.from_str(json.dumps(content)))
    plain = tokenizer.encode_plain("the  [MASK] tor")
    assert plain.offsets[plain.ids.index(tokenizer.mask_id)] == (5, 11)


def test_a_tokenizer_that_is_not_an_albert_s(folder: Path, tmp_path: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"][4][0] = content["added_tokens"][4]["content"] = "[M]"
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(content))
    with pytest.raises(BundleCorruptError, match=r"no token \[MASK\] or <mask>"):
        AlbertTokenizer.from_file(file)
