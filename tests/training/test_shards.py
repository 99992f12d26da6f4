"""A tokenised corpus is the text it was made of, made once, and never half-written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from albert_serve.tokenizer import AlbertTokenizer
from tests.training.support import REPOSITORY, WIKI
from training.corpus import CorpusError, read_documents, split_sentences
from training.shards import ShardError, Shards, prepare


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    file = tmp_path / "corpus.txt"
    file.write_text("One sentence. And another.\n\nA second document.\n\n \n\n\u200b\n")
    return file


@pytest.fixture
def tokenizer_file(vocab_dir: Path) -> Path:
    return vocab_dir / "tokenizer.json"


def test_tokens_are_those_of_the_text(shards: Shards, tokenizer: AlbertTokenizer) -> None:
    documents = list(read_documents([WIKI]))
    assert shards.num_documents == len(documents)
    assert shards.tokens.dtype == np.uint16
    for number, document in enumerate(documents):
        first, last = shards.documents[number : number + 2].tolist()
        bounds = shards.sentences[first : last + 1].tolist()
        ids = [shards.tokens[a:b].tolist() for a, b in pairwise(bounds)]
        assert ids == [tokenizer.encode_plain(text).ids for text in split_sentences(document)]


def test_tokens_decode_to_the_text(shards: Shards, tokenizer: AlbertTokenizer) -> None:
    bounds = shards.sentences[:20].tolist()
    sentences = split_sentences(next(read_documents([WIKI])))
    for (begin, end), text in zip(pairwise(bounds), sentences, strict=False):
        decoded = tokenizer.decode(shards.tokens[begin:end].tolist(), keep_special=True)
        assert decoded == text.lower()


def test_documents_without_a_sentence_are_left_out(
    corpus: Path, tokenizer_file: Path, tmp_path: Path
) -> None:
    shards = prepare([corpus], tokenizer_file, tmp_path / "shards")
    assert shards.num_documents == 2
    assert shards.documents.tolist() == [0, 2, 3]
    note = json.loads((tmp_path / "shards" / "shards.json").read_text())
    assert note["documents"] == 2
    assert note["tokens"] == len(shards.tokens)
    assert sorted(file.name for file in (tmp_path / "shards").iterdir()) == [
        *("documents.npy", "sentences.npy", "shards.json", "tokens.npy"),
    ]


def test_a_corpus_is_tokenised_once(corpus: Path, tokenizer_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    made = [prepare([corpus], tokenizer_file, folder)]
    file = folder / "tokens.npy"
    first = file.stat().st_ino
    made.append(prepare([corpus], tokenizer_file, folder))
    assert file.stat().st_ino == first
    corpus.write_text("Another text. Of two sentences.")
    made.append(prepare([corpus], tokenizer_file, folder))
    assert file.stat().st_ino != first
    assert [one.num_documents for one in made] == [2, 2, 1]


def cut(name: str, size: int) -> Callable[[Path], Any]:
    return lambda folder: os.truncate(folder / name, size)


def overwrite(name: str, values: Any) -> Callable[[Path], Any]:
    return lambda folder: np.save(folder / name, np.asarray(values))


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "missing": lambda folder: (folder / "tokens.npy").unlink(),
    "truncated": cut("tokens.npy", 140),
    "empty": cut("sentences.npy", 0),
    "cut header": cut("documents.npy", 20),
    "no array": lambda folder: (folder / "tokens.npy").write_bytes(b"text"),
    "no document": overwrite("documents.npy", np.zeros(0, np.int64)),
    "other documents": overwrite("documents.npy", [0, 1]),
    "other sentences": overwrite("sentences.npy", [0, 1, 2, 3]),
    "descending": overwrite("documents.npy", [0, 4, 3]),
    "two-dimensional": overwrite("documents.npy", [[0, 3]]),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_files_are_refused(
    corpus: Path, tokenizer_file: Path, tmp_path: Path, damage: Callable[[Path], Any]
) -> None:
    folder = tmp_path / "shards"
    prepare([corpus], tokenizer_file, folder)
    damage(folder)
    with pytest.raises(ShardError, match=f"{folder}.*delete it"):
        Shards.open(folder)


@pytest.mark.parametrize("note", ["", "[]", "{}", "{", None])
def test_without_its_note_a_corpus_is_made_anew(
    corpus: Path, tokenizer_file: Path, tmp_path: Path, note: str | None
) -> None:
    folder = tmp_path / "shards"
    prepare([corpus], tokenizer_file, folder)
    (folder / "tokens.npy").write_bytes(b"")
    (folder / "shards.json").unlink()
    if note is not None:
        (folder / "shards.json").write_text(note)
    assert prepare([corpus], tokenizer_file, folder).num_documents == 2


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "\n \n", "the corpus holds no sentence"),
        ("a.jsonl", '{"text": "A sentence."}\n{"text"', "line 2: not JSON"),
    ],
)
def test_a_corpus_that_fails_leaves_nothing_behind(
    tmp_path: Path, tokenizer_file: Path, name: str, content: str, message: str
) -> None:
    file = tmp_path / name
    file.write_text(content)
    with pytest.raises((ShardError, CorpusError), match=message):
        prepare([file], tokenizer_file, tmp_path / "shards")
    assert [each.name for each in tmp_path.iterdir()] == [name]


def test_a_preparation_that_is_killed_is_made_anew(tmp_path: Path, tokenizer_file: Path) -> None:
    """The corpus is a pipe that never ends, so that the kill comes in the middle."""
    pipe, folder = tmp_path / "endless.txt", tmp_path / "shards"
    code = (
        "import sys; from pathlib import Path; from training.shards import _write;"
        "from tokenizers import Tokenizer; from itertools import repeat;"
        "folder = Path(sys.argv[2]); folder.mkdir();"
        "_write(repeat('A sentence.'), Tokenizer.from_file(sys.argv[1]), folder)"
    )
    partial = folder.with_name("shards.partial")
    command = [sys.executable, "-c", code, str(tokenizer_file), str(partial)]
    with subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.DEVNULL) as process:
        written = partial / "tokens.bin"
        while not (written.is_file() and written.stat().st_size):
            assert process.poll() is None
            time.sleep(0.02)
        process.kill()
    assert not folder.exists()
    pipe.write_text("A sentence.")
    assert prepare([pipe], tokenizer_file, folder).num_documents == 1
    assert not partial.exists()
