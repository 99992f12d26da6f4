"""A small vocabulary, corpora, and runs that all training tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from albert_serve.tokenizer import AlbertTokenizer
from tests.training.processes import run_in_process
from tests.training.support import SQUAD, WIKI, write
from training.commands import finetune, pretrain
from training.data.corpus import read_documents
from training.data.preparation import prepare
from training.data.shards import Shards
from training.vocabulary.spiece import build_tokenizer
from training.vocabulary.training import train_vocab


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """One thread of torch. Small models are slower with several, and their rounding differs."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def vocab_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a vocabulary of 800 pieces."""
    folder = tmp_path_factory.mktemp("vocab")
    spiece = train_vocab(read_documents([WIKI]), folder, vocab_size=800)
    build_tokenizer(spiece).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def tokenizer_file(vocab_dir: Path) -> Path:
    return vocab_dir / "tokenizer.json"


@pytest.fixture(scope="session")
def tokenizer(vocab_dir: Path) -> AlbertTokenizer:
    return AlbertTokenizer.from_file(vocab_dir / "tokenizer.json")


@pytest.fixture(scope="session")
def easy_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of five sentences that repeat in the same order, starting with any of them."""
    sentences = [
        "The school is in the city.",
        "Many people came to play music.",
        "A river was named after him.",
        "They won two games in May.",
        "Her father had been a king.",
    ]
    documents = [" ".join((sentences * 3)[start : start + 8]) for start in range(5)]
    return write(tmp_path_factory.mktemp("corpus") / "easy.txt", "\n\n".join(documents * 20))


@pytest.fixture(scope="session")
def pretrain_options(easy_corpus: Path, vocab_dir: Path) -> list[str]:
    """Options of a pretraining run of 80 steps that learns `easy_corpus`, without its folder."""
    return [
        *("--corpus", str(easy_corpus), "--tokenizer", str(vocab_dir)),
        *("--embedding-size", "32", "--hidden-size", "32", "--layers", "2", "--heads", "2"),
        *("--max-positions", "64", "--length", "32", "--batch-size", "16", "--steps", "80"),
        *("--lr", "1e-2", "--adamw-lr", "1e-2", "--no-compile", "--device", "cpu"),
        *("--report-every", "5"),
    ]


@pytest.fixture(scope="session")
def pretrained_run(pretrain_options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run with `pretrain_options`. Copy it before changing it."""
    folder = tmp_path_factory.mktemp("pretrained") / "run"
    assert pretrain.main([*pretrain_options, "--output", str(folder)]) == 0
    return folder


@pytest.fixture(scope="session")
def labelled_texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of forty short texts with label 1 if the text is positive, else 0."""
    words = {1: ("good", "beautiful", "great", "first"), 0: ("war", "died", "not", "lost")}
    things = ("the game", "a city", "his music", "her work", "their school")
    rows = [f"{t} was {word}\t{label}" for label in (1, 0) for t in things for word in words[label]]
    content = "\n".join(["text\tlabel", *rows])
    return write(tmp_path_factory.mktemp("labelled") / "texts.tsv", content)


@pytest.fixture(scope="session")
def short_finetune_options(pretrained_run: Path) -> list[str]:
    """Options of a finetuning run of six steps, without its data and folder.

    If an option is repeated, the last one applies.
    """
    return [
        *("--initialize-from", str(pretrained_run / "checkpoint"), "--length", "64"),
        *("--batch-size", "4", "--steps", "6", "--lr", "1e-2", "--adamw-lr", "1e-2"),
        *("--precision", "fp32", "--device", "cpu", "--report-every", "2"),
    ]


@pytest.fixture(scope="session")
def finetune_options(pretrained_run: Path, easy_corpus: Path, labelled_texts: Path) -> list[str]:
    """Options of a finetuning run of 40 steps on three task streams, without its folder."""
    return [
        *("--initialize-from", str(pretrained_run / "checkpoint"), "--steps", "40"),
        *("--text-classification", str(labelled_texts), "--labels", "negative", "positive"),
        *("--question-answering", str(SQUAD), "--pretraining", str(easy_corpus)),
        *("--length", "64", "--batch-size", "24", "4", "4"),
        *("--optimizer", "muon", "--lr", "5e-3", "--adamw-lr", "1e-2", "--report-every", "10"),
        *("--device", "cpu"),
    ]


@pytest.fixture(scope="session")
def finetuned_run(finetune_options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run with `finetune_options`. Copy it before changing it."""
    folder = tmp_path_factory.mktemp("finetuned") / "run"
    assert finetune.main([*finetune_options, "--output", str(folder)]) == 0
    return folder


@pytest.fixture(scope="session")
def shards(vocab_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Shards:
    """The shards of the articles of `wiki.jsonl`."""
    return prepare([WIKI], vocab_dir / "tokenizer.json", tmp_path_factory.mktemp("s") / "shards")


@pytest.fixture(scope="session")
def tiny_options(
    easy_corpus: Path, vocab_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[str]:
    """Options of a run of 8 steps, each of two passes with dropout, without the run's folder."""
    folder = tmp_path_factory.mktemp("tiny") / "shards"
    prepare([easy_corpus], vocab_dir / "tokenizer.json", folder)
    return [
        *("--shards", str(folder), "--tokenizer", str(vocab_dir), "--dropout", "v1"),
        *("--embedding-size", "16", "--hidden-size", "16", "--layers", "3", "--heads", "2"),
        *("--max-positions", "32", "--length", "32", "--batch-size", "8"),
        *("--micro-batch-size", "4", "--steps", "8", "--report-every", "1"),
        *("--no-compile", "--device", "cpu"),
    ]


@pytest.fixture(scope="session")
def tiny_run(tiny_options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run with `tiny_options`. Copy it before changing it."""
    folder = tmp_path_factory.mktemp("tiny") / "run"
    assert run_in_process(tiny_options, folder).status == 0
    return folder
