"""A corpus is tokenised once, the same however it is done, and opened whole and checked."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from albert_serve.tokenizer import AlbertTokenizer
from tests.training.support import SMALL_PART, WIKI, file_contents, make_shards
from training.commands.prepare import main
from training.data import tokenization as tokenising
from training.data.corpus import read_documents, split_sentences
from training.data.preparation import prepare
from training.data.shards import Shard, ShardError, Shards

pytestmark = pytest.mark.process

Capture = pytest.CaptureFixture[str]
TEXT = "One sentence. And another.\n\nA second document.\n\n \n\n\u200b\n"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    file = tmp_path / "corpus.txt"
    file.write_text(TEXT)
    return file


def sentences(shards: Shards) -> list[list[list[int]]]:
    """The ids of each sentence of each document."""
    return [
        [
            part.tokens[begin:end].tolist()
            for begin, end in pairwise(part.sentences[first : last + 1].tolist())
        ]
        for part in shards.parts
        for first, last in pairwise(part.documents.tolist())
    ]


def test_tokens_are_those_of_the_text(shards: Shards, tokenizer: AlbertTokenizer) -> None:
    expected = [
        [tokenizer.encode_plain(text).ids for text in split_sentences(document)]
        for document in read_documents([WIKI])
    ]
    assert sentences(shards) == expected
    assert len(shards.parts) == 1
    assert shards.parts[0].tokens.dtype == np.uint16


def test_names_of_special_tokens_are_read_as_sentencepiece_reads_them(
    tmp_path: Path, vocab_dir: Path
) -> None:
    text = "the [MASK] of [CLS] and [SEP]"
    (tmp_path / "a.txt").write_text(text)
    shards = prepare([tmp_path / "a.txt"], vocab_dir / "tokenizer.json", tmp_path / "shards")
    model = sentencepiece.SentencePieceProcessor(model_file=str(vocab_dir / "spiece.model"))
    assert sentences(shards) == [[model.encode(text.lower())]]


def test_a_tokenizer_that_truncates_is_kept_from_it(tmp_path: Path, tokenizer_file: Path) -> None:
    short = json.loads(tokenizer_file.read_text())
    short["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (tmp_path / "short.json").write_text(json.dumps(short))
    made = [
        prepare([WIKI], file, tmp_path / file.stem).num_tokens
        for file in (tokenizer_file, tmp_path / "short.json")
    ]
    assert made[0] == made[1]


@pytest.mark.parametrize("num_workers", [2, 3])
def test_the_bytes_are_the_same_for_any_number_of_workers(
    in_parts: Path,
    tokenizer_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_workers: int,
) -> None:
    monkeypatch.setattr(tokenising, "_CHARACTERS_A_CHUNK", 1)
    folder = tmp_path / "shards"
    prepare([WIKI], tokenizer_file, folder, num_workers=num_workers, part_bytes=SMALL_PART)
    assert file_contents(folder) == file_contents(in_parts)


@settings(max_examples=15, deadline=None)
@given(
    documents=st.lists(st.integers(0, 8), min_size=1, max_size=12).filter(any),
    part_bytes=st.integers(400, 1000),
)
def test_parts_hold_whole_documents_and_as_many_as_they_can(
    documents: list[int],
    part_bytes: int,
    tokenizer_file: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    scratch = tmp_path_factory.mktemp("scratch")
    lines = [json.dumps({"text": "It rained. " * size + "\u200b"}) for size in documents]
    (scratch / "a.jsonl").write_text("\n".join(lines))
    args = [scratch / "a.jsonl"], tokenizer_file
    whole = prepare(*args, scratch / "whole")
    shards = prepare(*args, scratch / "parts", part_bytes=part_bytes)
    assert len(whole.parts) == 1
    assert sentences(shards) == sentences(whole)
    sizes = [
        sum(file.stat().st_size for file in folder.iterdir())
        for folder in sorted((scratch / "parts").glob("part-*"))
    ]
    for size, part in zip(sizes, shards.parts, strict=True):
        assert size <= part_bytes or part.num_documents == 1
    for size, part in zip(sizes, shards.parts[1:], strict=False):
        first = int(part.documents[1])
        assert size + 2 * int(part.sentences[first]) + 8 * (first + 1) > part_bytes


def test_a_corpus_is_tokenised_once(corpus: Path, tokenizer_file: Path, tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "shards", tmp_path / "elsewhere"
    file = folder / "part-00000" / "tokens.npy"
    prepare([corpus], tokenizer_file, folder)
    first = file.stat().st_ino
    elsewhere.mkdir()
    for path in (corpus, tokenizer_file):
        (elsewhere / path.name).write_bytes(path.read_bytes())
    again = prepare([elsewhere / "corpus.txt"], elsewhere / "tokenizer.json", folder)
    assert file.stat().st_ino == first
    assert sentences(again) == sentences(Shards.open(folder))


@pytest.mark.parametrize("is_whole", [True, False])
def test_another_corpus_is_refused(
    corpus: Path, tokenizer_file: Path, tmp_path: Path, is_whole: bool
) -> None:
    folder = tmp_path / "shards"
    prepare([corpus], tokenizer_file, folder)
    if not is_whole:
        (folder / "shards.json").rename(folder / "partial.json")
    (folder / "notes.txt").write_text("mine")
    before = file_contents(folder)
    corpus.write_text(TEXT.replace("One", "Two"))
    with pytest.raises(ShardError, match=f"{folder} holds another corpus, .*; delete it, or name"):
        prepare([corpus], tokenizer_file, folder)
    assert file_contents(folder) == before


def test_a_file_where_the_folder_should_be_is_refused(
    corpus: Path, tokenizer_file: Path, tmp_path: Path
) -> None:
    for folder in (corpus, corpus / "shards"):
        with pytest.raises(ShardError, match=f"{folder} cannot be written"):
            prepare([corpus], tokenizer_file, folder)
    assert corpus.read_text() == TEXT


def test_two_processes_do_not_prepare_into_one_folder(
    corpus: Path, tokenizer_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(ShardError, match=f"{folder} is being prepared by another process"):
        prepare([corpus], tokenizer_file, folder)
    os.close(descriptor)
    assert sum(part.num_documents for part in prepare([corpus], tokenizer_file, folder).parts) == 2


def test_the_command_prints_its_result(corpus: Path, vocab_dir: Path, capsys: Capture) -> None:
    folder = corpus.with_name("shards")
    options = ["--corpus", str(corpus), "--tokenizer", str(vocab_dir), "--output", str(folder)]
    assert main([*options, "--workers", "1"]) == 0
    num_tokens = Shards.open(folder).num_tokens
    line = f"{folder}: 2 documents, 3 sentences, {num_tokens} tokens\n"
    assert capsys.readouterr().out == line
    assert main(options) == 0
    assert capsys.readouterr().out == line


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tokenizer.json", None, "tokenizer.json cannot be read: No such file"),
        ("tokenizer.json", "{", "tokenizer.json is not a tokenizer"),
        ("corpus.txt", None, "corpus.txt does not exist"),
        ("corpus.txt", "\n \n", "the corpus holds no sentence"),
    ],
)
def test_bad_input_is_reported_in_one_line(
    tmp_path: Path, tokenizer_file: Path, capsys: Capture, name: str, text: str | None, message: str
) -> None:
    shutil.copy(tokenizer_file, tmp_path)
    (tmp_path / "corpus.txt").write_text(TEXT)
    (tmp_path / name).unlink()
    if text is not None:
        (tmp_path / name).write_text(text)
    options = ["--corpus", str(tmp_path / "corpus.txt"), "--tokenizer", str(tmp_path)]
    assert main([*options, "--output", str(tmp_path / "shards")]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1


@pytest.fixture
def folder(tokenizer_file: Path, tmp_path: Path) -> Path:
    """Two parts: of five sentences in two documents, and of one."""
    file = tmp_path / "corpus.txt"
    file.write_text("One. Two. Three.\n\nFour. Five.\n\n" + "And a long one, " * 100)
    prepare([file], tokenizer_file, tmp_path / "shards", part_bytes=700)
    return tmp_path / "shards"


def shards_of(*tokens: list[int]) -> Shards:
    return make_shards(
        *(
            Shard(
                tokens=np.array(part, np.uint16),
                sentences=np.array([0, len(part)]),
                documents=np.array([0, 1]),
            )
            for part in tokens
        )
    )


def test_an_id_outside_the_vocabulary_is_refused() -> None:
    shards = shards_of([1, 2], [3, 10])
    assert shards.token_counts(11)[10] == 1
    with pytest.raises(ShardError, match="token id 10, the vocabulary 10 tokens; prepare it"):
        shards.token_counts(10)


def test_the_tokenizer_is_compared(folder: Path, tokenizer_file: Path, tmp_path: Path) -> None:
    copy = tmp_path / "tokenizer.json"
    copy.write_bytes(tokenizer_file.read_bytes())
    Shards.open(folder, copy)
    copy.write_bytes(tokenizer_file.read_bytes() + b"\n")
    with pytest.raises(ShardError, match=f"{folder} was prepared with another .* than {copy}"):
        Shards.open(folder, copy)
    with pytest.raises(ShardError, match=r"none.json cannot be read: No such file"):
        Shards.open(folder, tmp_path / "none.json")


def overwrite(name: str, values: Any) -> Callable[[Path], Any]:
    return lambda part: np.save(part / name, np.asarray(values))


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "missing": lambda part: (part / "tokens.npy").unlink(),
    "truncated": lambda part: os.truncate(part / "tokens.npy", 140),
    "empty": lambda part: os.truncate(part / "sentences.npy", 0),
    "no array": lambda part: (part / "tokens.npy").write_bytes(b"text"),
    "no document": overwrite("documents.npy", np.zeros(0, np.int64)),
    "other documents": overwrite("documents.npy", [0, 1]),
    "other sentences": overwrite("sentences.npy", [0, 1, 2, 3]),
    "descending": overwrite("documents.npy", [0, 6, 5]),
    "no integers": overwrite("documents.npy", [0.0, 2.0, 5.0]),
    "no ids": overwrite("tokens.npy", ["text"]),
    "one document for two": overwrite("documents.npy", [0, 5]),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_files_are_named(folder: Path, damage: Callable[[Path], Any]) -> None:
    damage(folder / "part-00000")
    with pytest.raises(ShardError, match=f"{folder}/part-00000.*; delete {folder} and prepare"):
        Shards.open(folder)


@pytest.mark.parametrize("change", [{"format": 3}, {"parts": None}, {"parts": [{}]}])
def test_a_list_that_cannot_be_is_refused(folder: Path, change: dict[str, Any]) -> None:
    file = folder / "shards.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ShardError, match=f"{file} is damaged, .*; delete {folder} and prepare"):
        Shards.open(folder)


def test_a_folder_without_a_corpus_says_how_to_make_one(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(ShardError, match=r"shards.json; make it with albert-serve prepare"):
            Shards.open(folder)
