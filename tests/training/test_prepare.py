"""A corpus is tokenised once, the same however it is done or stopped, and opened whole."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from albert_serve.tokenizer import AlbertTokenizer
from tests.training.processes import (
    all_of,
    die_before_change,
    lead_a_group,
    prepare_parts,
    run_in_process,
    start,
)
from tests.training.support import (
    SMALL_PART,
    WIKI,
    file_contents,
    limited_file_size,
    make_part,
    make_shards,
)
from training.commands.prepare import main
from training.data import tokenization as tokenising
from training.data.corpus import CorpusPosition, Document, read_documents, split_sentences
from training.data.preparation import prepare
from training.data.shards import ShardError, Shards
from training.data.tokenization import tokenise

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


def test_a_tokenizer_that_truncates_is_kept_from_it(
    shards: Shards, tmp_path: Path, tokenizer_file: Path
) -> None:
    short = json.loads(tokenizer_file.read_text())
    truncation = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    file = tmp_path / "short.json"
    file.write_text(json.dumps({**short, "truncation": truncation}))
    assert prepare([WIKI], file, tmp_path / "shards").num_tokens == shards.num_tokens


def test_the_bytes_are_the_same_for_any_number_of_workers(
    tokenizer_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenising, "_CHARACTERS_A_CHUNK", 1)
    one, two = tmp_path / "one", tmp_path / "two"
    prepare([WIKI], tokenizer_file, one, part_bytes=SMALL_PART)
    prepare([WIKI], tokenizer_file, two, num_workers=2, part_bytes=SMALL_PART)
    assert len(file_contents(one)) > 3 * 4
    assert file_contents(one) == file_contents(two)


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


def test_a_file_where_the_folder_should_be_is_refused(corpus: Path, tokenizer_file: Path) -> None:
    with pytest.raises(ShardError, match=f"{corpus} cannot be written"):
        prepare([corpus], tokenizer_file, corpus)
    assert corpus.read_text() == TEXT


def test_two_processes_do_not_prepare_into_one_folder(
    corpus: Path, tokenizer_file: Path, tmp_path: Path
) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(ShardError, match=f"{tmp_path} is being prepared by another process"):
        prepare([corpus], tokenizer_file, tmp_path)
    os.close(descriptor)


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
        ("tokenizer.json", "{", "tokenizer.json is not a tokenizer"),
        ("corpus.txt", None, "corpus.txt does not exist"),
        ("corpus.txt", "\n \n", "the corpus holds no sentence"),
    ],
)
def test_bad_input_is_reported_in_one_line(
    corpus: Path, tokenizer_file: Path, capsys: Capture, name: str, text: str | None, message: str
) -> None:
    shutil.copy(tokenizer_file, corpus.parent)
    corpus.with_name(name).unlink()
    if text is not None:
        corpus.with_name(name).write_text(text)
    options = ["--corpus", str(corpus), "--tokenizer", str(corpus.parent)]
    assert main([*options, "--output", str(corpus.with_name("shards"))]) == 1
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


def test_an_id_outside_the_vocabulary_is_refused() -> None:
    parts = [make_part([[1, 2]], 11), make_part([[3, 3]], 11)]  # ids from 5 to 10
    assert make_shards(*parts).token_counts(11)[10] == 1
    with pytest.raises(ShardError, match="token id 10, the vocabulary 10 tokens; prepare it"):
        make_shards(*parts).token_counts(10)


def test_the_tokenizer_is_compared(folder: Path, tokenizer_file: Path, tmp_path: Path) -> None:
    copy = tmp_path / "tokenizer.json"
    copy.write_bytes(tokenizer_file.read_bytes())
    Shards.open(folder, copy)
    copy.write_bytes(tokenizer_file.read_bytes() + b"\n")
    with pytest.raises(ShardError, match=f"{folder} was prepared with another .* than {copy}"):
        Shards.open(folder, copy)


def overwrite(name: str, values: Any) -> Callable[[Path], Any]:
    return lambda part: np.save(part / name, np.asarray(values))


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "missing": lambda part: (part / "tokens.npy").unlink(),
    "truncated": lambda part: os.truncate(part / "tokens.npy", 140),
    "empty": lambda part: os.truncate(part / "sentences.npy", 0),
    "other documents": overwrite("documents.npy", [0, 1]),
    "other sentences": overwrite("sentences.npy", [0, 1, 2, 3]),
    "begins late": overwrite("documents.npy", [1, 3, 5]),
    "no sentence": overwrite("documents.npy", [0, 5, 5]),
    "no integers": overwrite("documents.npy", [0.0, 2.0, 5.0]),
    "no ids": overwrite("tokens.npy", ["text"]),
    "one document for two": overwrite("documents.npy", [0, 5]),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_files_are_named(folder: Path, damage: Callable[[Path], Any]) -> None:
    damage(folder / "part-00000")
    with pytest.raises(ShardError, match=f"{folder}/part-00000.*; delete {folder} and prepare"):
        Shards.open(folder)


@pytest.mark.parametrize("change", [{"format": 3}, {"parts": [{}]}])
def test_a_list_that_cannot_be_is_refused(folder: Path, change: dict[str, Any]) -> None:
    file = folder / "shards.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ShardError, match=f"{file} is damaged, .*; delete {folder} and prepare"):
        Shards.open(folder)


def test_a_folder_without_a_corpus_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match=r"shards.json; make it with albert-serve prepare"):
        Shards.open(tmp_path)


PREPARE: Final = "training.commands.prepare"


def test_killed_before_any_change_it_goes_on_to_the_same_bytes(
    tmp_path: Path, tokenizer_file: Path
) -> None:
    corpus, expected = tmp_path / "a.txt", tmp_path / "expected"
    corpus.write_text("\n\n".join(["It rained. " * 20, "It snowed. " * 25]))
    assert len(prepare([corpus], tokenizer_file, expected, part_bytes=600).parts) == 2
    options = ["--corpus", str(corpus), "--tokenizer", str(tokenizer_file.parent), "--workers", "1"]
    for number in count(1):
        folder = tmp_path / str(number)
        dies = partial(
            all_of, partial(prepare_parts, 600), partial(die_before_change, number, folder)
        )
        ended = run_in_process(options, folder, fate=dies, program=PREPARE)
        assert ended.status in (0, -signal.SIGKILL), ended.err
        if (folder / "shards.json").is_file():
            assert file_contents(folder) == file_contents(expected), number
        else:
            with pytest.raises(ShardError, match=r"is not whole|holds no shards\.json"):
                Shards.open(folder)
        prepare([corpus], tokenizer_file, folder, part_bytes=600)
        assert file_contents(folder) == file_contents(expected), number
        if ended.status == 0:
            break
    assert number > 2 * 6


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_stopped_with_its_workers_at_work_it_goes_on(
    tokenizer_file: Path, tmp_path: Path, number: signal.Signals
) -> None:
    folder, corpus = tmp_path / "shards", tmp_path / "corpus.jsonl"
    corpus.write_text(WIKI.read_text() * 20)
    options = ["--corpus", str(corpus), "--tokenizer", str(tokenizer_file.parent), "--workers", "2"]
    fate = partial(all_of, lead_a_group, partial(prepare_parts, SMALL_PART))
    started = start(options, folder, fate=fate, program=PREPARE)
    started.wait_for(folder / "partial.json")
    if number is signal.SIGKILL:
        started.send(number)
    else:
        os.killpg(started.process.pid or 0, number)
    ended = started.wait()
    if number is signal.SIGINT:
        assert (ended.status, ended.err) == (130, "\nstopped; repeat the command to resume it\n")
    with pytest.raises(ShardError, match=r"is not whole; give the command .* again"):
        Shards.open(folder)
    first = folder / "part-00000" / "tokens.npy"
    written = first.stat().st_mtime_ns
    prepare([corpus], tokenizer_file, folder, part_bytes=SMALL_PART)
    prepare([corpus], tokenizer_file, tmp_path / "whole", part_bytes=SMALL_PART)
    assert file_contents(folder) == file_contents(tmp_path / "whole")
    assert first.stat().st_mtime_ns == written


def test_stopped_while_its_workers_start_it_says_one_line(
    tokenizer_file: Path, tmp_path: Path
) -> None:
    options = ["--corpus", str(WIKI), "--tokenizer", str(tokenizer_file.parent), "--workers", "6"]
    started = start(options, tmp_path / "shards", fate=lead_a_group, program=PREPARE)
    while not psutil.Process(started.process.pid).children():
        time.sleep(0.01)
    os.killpg(started.process.pid or 0, signal.SIGINT)
    ended = started.wait()
    assert (ended.status, ended.err) == (130, "\nstopped; repeat the command to resume it\n")


def test_a_full_disk_keeps_the_whole_parts(tmp_path: Path, tokenizer_file: Path) -> None:
    corpus, folder, expected = tmp_path / "a.txt", tmp_path / "shards", tmp_path / "expected"
    corpus.write_text("It rained. " * 20 + "\n\n" + "It snowed. " * 5000)
    args = [corpus], tokenizer_file
    message = rf"{folder} cannot be written: .*\. 1 complete parts are saved\. Fix the problem"
    with limited_file_size(10_000), pytest.raises(ShardError, match=message):
        prepare(*args, folder, part_bytes=600)
    with pytest.raises(ShardError, match="is not whole"):
        Shards.open(folder)
    prepare(*args, folder, part_bytes=600)
    prepare(*args, expected, part_bytes=600)
    assert file_contents(folder) == file_contents(expected)


def test_a_dead_worker_is_reported(tokenizer_file: Path) -> None:
    def documents() -> Iterator[Document]:
        """Ends the workers once both are there."""
        while True:
            workers = multiprocessing.active_children()
            for worker in workers if len(workers) == 2 else ():
                worker.kill()
            yield Document(text="It rained. " * 100_000, end=CorpusPosition())

    with pytest.raises(ShardError, match="a worker was killed, most likely for want of memory"):
        list(tokenise(documents(), tokenizer_file, num_workers=2))
