"""The vocabulary is ALBERT's, the same at every run, and its failures say what to change."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import sentencepiece
from tokenizers import Tokenizer

from albert_serve.tokenizer import AlbertTokenizer
from training.commands.vocab import main
from training.data.corpus import read_documents
from training.vocabulary.settings import VocabError
from training.vocabulary.spiece import build_tokenizer
from training.vocabulary.training import train_vocab

pytestmark = pytest.mark.process

REPOSITORY = Path(__file__).parents[2]
WIKI = REPOSITORY / "tests" / "data" / "wiki.jsonl"


def train(output: Path, *, num_sentences: int = 10_000, seed: int = 0) -> bytes:
    documents = read_documents([WIKI])
    spiece = train_vocab(documents, output, vocab_size=800, num_sentences=num_sentences, seed=seed)
    return spiece.read_bytes()


@pytest.fixture(scope="module")
def spiece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vocab")
    train(folder)
    return folder / "spiece.model"


def test_pieces_begin_with_albert_s_special_and_user_symbols(spiece: Path) -> None:
    model = sentencepiece.SentencePieceProcessor(model_file=str(spiece))
    assert model.get_piece_size() == 800
    assert [model.id_to_piece(index) for index in range(13)] == [
        *("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"),
        *("(", ")", '"', "-", ".", "–", "£", "€"),
    ]
    assert (model.pad_id(), model.unk_id()) == (0, 1)
    assert (model.bos_id(), model.eos_id()) == (-1, -1)
    assert all(model.is_control(index) for index in (2, 3, 4))


def test_the_same_seed_gives_the_same_bytes_in_any_folder(tmp_path: Path) -> None:
    first = train(tmp_path / "one", num_sentences=500, seed=3)
    assert train(tmp_path / "two" / "deeper", num_sentences=500, seed=3) == first
    assert train(tmp_path / "three", num_sentences=500, seed=4) != first


@pytest.mark.parametrize(
    ("vocab_size", "message"),
    [
        pytest.param(
            50_000, "no vocabulary of 50000 .* too high .* Change --vocab-size", id="high"
        ),
        pytest.param(20, "no vocabulary of 20 .* smaller than required_chars", id="low"),
    ],
)
def test_a_size_that_the_corpus_does_not_allow(
    tmp_path: Path, vocab_size: int, message: str
) -> None:
    with pytest.raises(VocabError, match=message):
        train_vocab(read_documents([WIKI]), tmp_path, vocab_size=vocab_size)
    assert not list(tmp_path.iterdir())


def test_a_vocabulary_has_at_least_the_pieces_that_its_characters_need(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = tmp_path / "hindi.txt"
    corpus.write_text("यह मेरा घर है। वह काम करता है। दिन लंबा था। दीन आदमी सो गया।")
    options = ["--corpus", str(corpus), "--vocab-size", "20", "--output", str(tmp_path / "vocab")]
    assert main(options) == 0
    printed = capsys.readouterr()
    size = AlbertTokenizer.from_file(tmp_path / "vocab" / "tokenizer.json").vocab_size
    assert f"the vocabulary has the {size} that it needs" in printed.err
    assert f"{size} pieces in" in printed.out


def test_main_writes_both_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--corpus", str(WIKI), "--vocab-size", "500", "--output", str(tmp_path / "new")]
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith("500 pieces in ")
    tokenizer = Tokenizer.from_file(str(tmp_path / "new" / "tokenizer.json"))
    built = build_tokenizer(tmp_path / "new" / "spiece.model")
    assert tokenizer.get_vocab() == built.get_vocab()
    assert tokenizer.encode("Some text.").ids == built.encode("Some text.").ids


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "without --cased and --keep-accents, such as schon = schön, Der = der"),
        (["--cased"], "2 of 12 distinct words .* without --keep-accents, such as schon = schön"),
        (["--cased", "--keep-accents"], None),
    ],
)
def test_it_says_which_words_become_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str | None
) -> None:
    corpus = tmp_path / "german.txt"
    corpus.write_text("Der Tag war schon lang, der Abend schön und die Nacht kurz.\n" * 9)
    arguments = ["--corpus", str(corpus), "--output", str(tmp_path / "new")]
    arguments += ["--vocab-size", str(35 + 4 * len(options[:1]))]
    assert main([*arguments, *options]) == 0
    said = capsys.readouterr().err
    assert "become equal" not in said if message is None else re.search(message, said)
    tokenizer = AlbertTokenizer.from_file(tmp_path / "new" / "tokenizer.json")
    schon, schoen = (tokenizer.encode(word).ids for word in ("schon", "schön"))
    assert (schon == schoen) == ("--keep-accents" not in options)
