"""Tokenizers give the ids of SentencePiece's library; trained vocabularies have ALBERT's format."""

from __future__ import annotations

import io
import re
import string
import unicodedata
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal

import pytest
import sentencepiece
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from albert_serve.tokenizer import SPECIAL_TOKENS, AlbertTokenizer
from tests.training.support import WIKI, write
from tests.training.vocabulary.oracle import preprocess_text
from training.commands.vocab import main
from training.data.corpus import read_documents
from training.vocabulary.settings import VocabError, VocabularySettings
from training.vocabulary.spiece import build_tokenizer
from training.vocabulary.training import train_vocab

pytestmark = pytest.mark.process

LANGUAGES: Final = {
    # Shadda precedes the vowel, as in typed text, unlike in Unicode's canonical order. Only these
    # two marks occur, because two classes of marks are the fewest that need separate composition.
    "arabic": (
        "\u0625\u064e\u0646\u0651\u064e \u0627\u0644\u0634\u0651\u064e\u0645\u064e\u0633\u064e "
        "\u0623\u064e\u062d\u064e\u0628\u0651\u064e"
    ),
    "german": "Der Bär kommt über die Straße. Äpfel und Öl sind schön, Maus und Haus nicht.",
    "greek": "Ο ΟΔΟΣ της Αθήνας είναι μεγάλος. Σήμερα ο καιρός είναι καλός. Σ' Σ'Σ",
    "hindi": "यह मेरा घर है। वह काम करता है। वह कम बोलता है। दिन लंबा था। दीन आदमी हिन्दी।",
    "japanese": "がっこうへ行きます。カタカナとひらがな、ガギグゲゴとパピプペポ。",
    "korean": "오늘은 날씨가 맑고 바람이 조금 붑니다. 학교에서 노래를 배웠습니다.",
    "tamil": "நான் பள்ளிக்கு செல்கிறேன். கொடு போ கௌ",
    "thai": "วันนี้อากาศดีมาก ฉันอ่านหนังสือกับเพื่อน น้ำ",
    "vietnamese": "Hôm nay thời tiết rất đẹp. Chúng tôi đi dạo ở Việt Nam",
}
UNUSUAL: Final = (
    *("(", "-", "``", "\u3000", "\x1c", "\u200b"),
    *("\u0301", "①", "Ａ", "ｶﾞ", "ﬁ", "\ufe0f"),
)


@dataclass(frozen=True)
class Model:
    """A model trained on one sentence, and whether case and accents are folded before it."""

    language: str
    folds: bool = True
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def sentence(self) -> str:
        text = LANGUAGES[self.language]
        return preprocess_text(text, lower=self.folds, keep_accents=not self.folds)

    def train(self, file: Path) -> Path:
        options = dict(self.options)
        composed = unicodedata.normalize("NFC", self.sentence)
        size = len({*self.sentence, *composed}) + 24 + 256 * options.get("byte_fallback", False)
        file.write_bytes(train(self.sentence, vocab_size=size, **options))
        return file

    def differs(self, first: str, second: str) -> bool:
        """Whether SentencePiece reads the mark `second` differently (docs/languages.md)."""
        normalised = unicodedata.normalize("NFKC", first)
        if "nmt_nfkc_cf" in dict(self.options).values():
            normalised = normalised.casefold()
        is_lost = normalised != first and unicodedata.category(second).startswith("M")
        are_marks = unicodedata.combining(first) and unicodedata.combining(second)
        return is_lost or (self.language != "arabic" and bool(are_marks))

    def __str__(self) -> str:
        options = "-".join(str(value) for _, value in self.options)
        return f"{self.language}-{'folded' if self.folds else 'cased'}-{options}".rstrip("-")


def train(sentence: str, **options: Any) -> bytes:
    model = io.BytesIO()
    ids = {"pad_id": 0, "unk_id": 1, "bos_id": -1, "eos_id": -1}
    defaults: dict[str, Any] = {
        **ids,
        "control_symbols": list(SPECIAL_TOKENS[2:]),
        "user_defined_symbols": ["(", ")", '"', "-", "."],
        "normalization_rule_name": "nmt_nfkc",
        "character_coverage": 1.0,
        "minloglevel": 2,
        "hard_vocab_limit": options.get("model_type") == "bpe",
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([sentence] * 9), model_writer=model, **(defaults | options)
    )
    return model.getvalue()


MODELS: Final = (
    *(Model(language, folds) for language in LANGUAGES for folds in (True, False)),
    Model("german", False, (("model_type", "bpe"),)),
    Model("korean", True, (("model_type", "bpe"), ("byte_fallback", True))),
    Model("japanese", False, (("byte_fallback", True),)),
    Model("german", False, (("normalization_rule_name", "identity"),)),
    Model("german", False, (("normalization_rule_name", "nmt_nfkc_cf"),)),
    Model("vietnamese", False, (("split_by_whitespace", False),)),
    Model("thai", False, (("user_defined_symbols", ["าก", "ากาก"]),)),
)


def texts(language: str) -> st.SearchStrategy[str]:
    sentence = LANGUAGES[language]
    parts = st.sampled_from([*sentence, *sentence.split(), *UNUSUAL])
    forms: st.SearchStrategy[Literal["NFC", "NFD"]] = st.sampled_from(["NFC", "NFD"])
    pieces = st.builds(unicodedata.normalize, forms, parts) | parts.map(str.upper)
    return st.lists(pieces | st.just(" "), max_size=8).map("".join)


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_text_has_the_ids_of_sentencepiece_and_ascending_offsets(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if model.language == "arabic":  # with two composed letters, which are as many as possible here
        monkeypatch.setattr("training.vocabulary.spiece._MAX_COMPOSED", 2)
    spiece = model.train(tmp_path / "spiece.model")
    settings_ = VocabularySettings(do_lower_case=model.folds, keep_accents=not model.folds)
    tokenizer = AlbertTokenizer(build_tokenizer(spiece, settings_))
    library = sentencepiece.SentencePieceProcessor(model_file=str(spiece))

    @settings(deadline=None, max_examples=60)
    @given(texts(model.language))
    @example("\u00fc\u0301 \u00f4\u0301")  # composed letters with an additional mark
    @example("\uac00\u11a8")
    @example("\u0646\u0651\u064e")  # two marks that NFC sorts
    @example("มากกาก ากาก")  # user-defined symbols
    def check(text: str) -> None:
        assume(not any(model.differs(*pair) for pair in pairwise(text)))
        encoding = tokenizer.encode_plain(text)
        normalised = preprocess_text(text, lower=model.folds, keep_accents=not model.folds)
        assert encoding.ids == library.encode(normalised)
        previous_start = 0
        for start, end in encoding.offsets:
            assert previous_start <= start < end <= len(text)
            previous_start = start

    check()


@pytest.mark.parametrize("folds", [True, False])
def test_pieces_determine_the_folding_of_case_and_accents(tmp_path: Path, folds: bool) -> None:
    """The folder has no settings of the tokenizer."""
    spiece = Model("german", folds).train(tmp_path / "spiece.model")
    tokenizer = AlbertTokenizer(build_tokenizer(spiece))
    assert (tokenizer.encode("der bar").ids == tokenizer.encode("Der Bär").ids) == folds
    assert tokenizer.unk_id not in tokenizer.encode("Der Bär").ids


def test_a_model_that_cannot_be_reproduced_is_rejected(tmp_path: Path) -> None:
    spiece, defaults = tmp_path / "spiece.model", VocabularySettings()
    cases: list[tuple[dict[str, Any], VocabularySettings, str]] = [
        ({"model_type": "char"}, defaults, "neither unigram nor bpe"),
        ({"treat_whitespace_as_suffix": True}, defaults, "treat_whitespace_as_suffix"),
        ({"add_dummy_prefix": False}, defaults, "add_dummy_prefix"),
        ({"control_symbols": ["[CLS]", "[SEP]"]}, defaults, r"no piece \[MASK\] or <mask>"),
        ({"model_type": "bpe", "user_defined_symbols": ["##"]}, defaults, "user-defined sym"),
        ({}, replace(defaults, tokenizer_class="XLMRobertaTokenizer"), "XLMRobertaTokenizer"),
    ]
    for options, settings_, message in cases:
        spiece.write_bytes(train(LANGUAGES["german"], **{"vocab_size": 50, **options}))
        with pytest.raises(VocabError, match=message):
            build_tokenizer(spiece, settings_)
    spiece.write_bytes(b"text")
    with pytest.raises(VocabError, match="cannot be read as a SentencePiece model"):
        build_tokenizer(spiece)


def test_the_vocabulary_starts_with_the_symbols_of_albert(vocab_dir: Path) -> None:
    model = sentencepiece.SentencePieceProcessor(model_file=str(vocab_dir / "spiece.model"))
    assert model.get_piece_size() == 800
    assert [model.id_to_piece(index) for index in range(13)] == [
        *("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"),
        *("(", ")", '"', "-", ".", "–", "£", "€"),
    ]
    assert (model.pad_id(), model.unk_id()) == (0, 1)
    assert (model.bos_id(), model.eos_id()) == (-1, -1)
    assert all(model.is_control(index) for index in (2, 3, 4))


def test_a_corpus_that_does_not_fit_the_vocabulary_is_rejected(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"vocab_size": 50_000}, "A vocabulary of 50000 .* too high .* Change --vocab-size"),
        ({"vocab_size": 20}, "A vocabulary of 20 .* smaller than required_chars"),
        ({"num_sentences": 0}, "no sentence to train on"),
    ]
    for options, message in cases:
        with pytest.raises(VocabError, match=message):
            train_vocab(read_documents([WIKI]), tmp_path, **options)
    assert not list(tmp_path.iterdir())


def test_sentences_are_drawn_from_the_complete_corpus(tmp_path: Path) -> None:
    letters: set[str] = set()
    for seed in range(20):
        sentences = (f"{letter}{letter} {letter}" for letter in string.ascii_lowercase)
        file = train_vocab(sentences, tmp_path, vocab_size=16, num_sentences=2, seed=seed)
        model = sentencepiece.SentencePieceProcessor(model_file=str(file))
        drawn = {model.id_to_piece(index) for index in range(13, 16)} - {"▁"}
        assert len(drawn) == 2
        letters |= drawn
    assert len(letters) > 15


def test_the_vocabulary_size_is_raised_to_what_the_characters_need(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "यह मेरा घर है। वह काम करता है। दिन लंबा था। दीन आदमी सो गया।"
    corpus = write(tmp_path / "hindi.txt", text)
    options = ["--corpus", str(corpus), "--vocab-size", "20", "--output", str(tmp_path / "vocab")]
    assert main(options) == 0
    output = capsys.readouterr()
    size = AlbertTokenizer.from_file(tmp_path / "vocab" / "tokenizer.json").vocab_size
    assert f"The vocabulary gets {size} pieces." in output.err
    assert f"{size} pieces in" in output.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "without --cased and --keep-accents, such as schon = schön, Der = der"),
        (["--cased"], "2 of 12 distinct words .* without --keep-accents, such as schon = schön"),
        (["--cased", "--keep-accents"], None),
    ],
)
def test_words_that_folding_makes_equal_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str | None
) -> None:
    corpus, output = tmp_path / "german.txt", tmp_path / "new"
    corpus.write_text("Der Tag war schon lang, der Abend schön und die Nacht kurz.\n" * 9)
    arguments = ["--corpus", str(corpus), "--output", str(output)]
    assert main([*arguments, "--vocab-size", "39" if options else "35", *options]) == 0
    printed = capsys.readouterr().err
    assert re.search(message or "^(?!.*become equal)", printed)
    tokenizer = AlbertTokenizer.from_file(output / "tokenizer.json")
    schon, schoen = (tokenizer.encode(word).ids for word in ("schon", "schön"))
    assert (schon == schoen) == ("--keep-accents" not in options)
