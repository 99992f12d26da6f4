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
    corpora,
    file_contents,
    limited_file_size,
    make_part,
    make_shards,
)
from training.commands.prepare import main
from training.data import tokenization as tokenising
from training.data.corpus import CorpusPosition, Document, read_documents, split_sentences
from training.data.preparation import prepare
from training.data.shard_writer import ShardWriter
from training.data.shards import CorpusManifest, ShardError, Shards
from training.data.tokenization import Tokenised, tokenise

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


def test_the_tokenizer_splits_names_of_special_tokens_and_truncates_nothing(
    tmp_path: Path, vocab_dir: Path
) -> None:
    text = "the [MASK] of [CLS] and [SEP]"
    (tmp_path / "a.txt").write_text(text)
    content = json.loads((vocab_dir / "tokenizer.json").read_text())
    truncation = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    content["truncation"] = truncation
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    shards = prepare([tmp_path / "a.txt"], tmp_path / "tokenizer.json", tmp_path / "shards")
    model = sentencepiece.SentencePieceProcessor(model_file=str(vocab_dir / "spiece.model"))
    assert sentences(shards) == [[model.encode(text.lower())]]


def test_the_bytes_are_the_same_for_any_number_of_workers(
    tokenizer_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenising, "_CHUNK_CHARACTERS", 1)
    one, two = tmp_path / "one", tmp_path / "two"
    prepare([WIKI], tokenizer_file, one, part_bytes=SMALL_PART)
    prepare([WIKI], tokenizer_file, two, num_workers=2, part_bytes=SMALL_PART)
    assert len(file_contents(one)) > 3 * 4
    assert file_contents(one) == file_contents(two)


def tokenised(lengths: list[int]) -> Tokenised:
    tokens = np.arange(sum(lengths), dtype=np.int32)
    return Tokenised(tokens=tokens, lengths=np.array(lengths, np.int32), end=CorpusPosition())


@settings(max_examples=25, deadline=None)
@given(
    corpora.filter(lambda documents: len(documents) > 1),
    st.sampled_from([(1 << 16, np.uint16), ((1 << 16) + 1, np.int32)]),
)
def test_a_part_has_as_many_whole_documents_as_its_bytes_allow(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], kind: tuple[int, type]
) -> None:
    vocab_size, dtype = kind

    def write(part_bytes: int) -> tuple[list[int], Shards]:
        """The bytes of each part's files, and the parts."""
        folder = tmp_path_factory.mktemp("shards")
        manifest = CorpusManifest(tokenizer_sha256="", fingerprint="")
        writer = ShardWriter(folder, manifest, part_bytes=part_bytes, vocab_size=vocab_size)
        writer.write(map(tokenised, [[], *documents, []]))
        shards = Shards.open(folder)
        assert {part.tokens.dtype for part in shards.parts} == {np.dtype(dtype)}
        return [folder_size(part) for part in sorted(folder.glob("part-*"))], shards

    (size,), whole = write(1 << 30)
    assert [list(map(len, document)) for document in sentences(whole)] == documents
    assert write(size)[0] == [size]
    _, parts = write(size - 1)
    assert [part.num_documents for part in parts.parts] == [len(documents) - 1, 1]
    assert list(map(len, sentences(parts))) == list(map(len, documents))
    assert write(1)[1].parts[0].num_documents == 1


def folder_size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def test_workers_get_up_to_256_documents_or_256_ki_characters(tokenizer_file: Path) -> None:
    for size, num_documents, expected in ((1, 600, [256, 256, 88]), (1 << 17, 3, [2, 1])):
        documents = [Document(text="a" * size, end=CorpusPosition())] * num_documents
        chunks = tokenise(documents, tokenizer_file, num_workers=1)
        assert list(map(len, chunks)) == expected


def test_the_same_corpus_is_tokenised_once_and_another_rejected(
    corpus: Path, tokenizer_file: Path, tmp_path: Path
) -> None:
    """Names, sizes, ends, column and size of parts are compared; the middle of a file is not."""
    folder, gap = tmp_path / "shards", " " * ((1 << 20) - 7)
    text = f"One.\n {gap}\nTwo.\nThree.\n{gap}\nFour."  # 1 MiB before Two and after Three
    changes: list[tuple[str, str, dict[str, Any]]] = [
        ("corpus.txt", text.replace("One.", "Six."), {}),
        ("corpus.txt", text.replace("Four", "Five"), {}),
        ("corpus.txt", text + "\n", {}),
        ("renamed.txt", text, {}),
        ("corpus.txt", text, {"text_column": "body"}),
        ("corpus.txt", text, {"part_bytes": 700}),
    ]
    corpus.write_text(text)
    prepare([corpus], tokenizer_file, folder)
    before = file_contents(folder)
    for name, content, options in changes:
        corpus.with_name(name).write_text(content)
        with pytest.raises(ShardError, match=f"{folder} contains another corpus"):
            prepare([corpus.with_name(name)], tokenizer_file, folder, **options)
    moved = tmp_path / "elsewhere" / "corpus.txt"
    moved.parent.mkdir()
    moved.write_text(text.replace("Two.\nThree.", "Six.\nSeven."))
    again = prepare([moved], Path(shutil.copy(tokenizer_file, moved.parent)), folder)
    assert sentences(again) == sentences(Shards.open(folder))
    assert file_contents(folder) == before
    (folder / "shards.json").rename(folder / "partial.json")
    corpus.write_text(TEXT)
    with pytest.raises(ShardError, match=f"{folder} contains another corpus"):
        prepare([corpus], tokenizer_file, folder)


def test_a_folder_that_is_locked_or_cannot_be_made_is_rejected(
    corpus: Path, tokenizer_file: Path, tmp_path: Path
) -> None:
    with pytest.raises(ShardError, match=f"{corpus} cannot be written"):
        prepare([corpus], tokenizer_file, corpus)
    assert corpus.read_text() == TEXT
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(ShardError, match=f"Another process is preparing {tmp_path}"):
        prepare([corpus], tokenizer_file, tmp_path)
    os.close(descriptor)


def test_the_command_prints_its_result_or_an_error_in_one_line(
    corpus: Path, tokenizer_file: Path, capsys: Capture
) -> None:
    folder, copy = corpus.with_name("shards"), corpus.with_name("tokenizer.json")
    shutil.copy(tokenizer_file, copy)
    options = ["--corpus", str(corpus), "--tokenizer", str(corpus.parent), "--output", str(folder)]
    for more in (["--workers", "1"], []):
        assert main([*options, *more]) == 0
        num_tokens = Shards.open(folder).num_tokens
        expected = f"{folder}: 2 documents, 3 sentences, {num_tokens} tokens\n"
        assert capsys.readouterr().out == expected
    for file, text, message in (
        (corpus, "\n \n", "The corpus contains no sentence"),
        (copy, "{", "tokenizer.json is not a tokenizer"),
    ):
        shutil.rmtree(folder, ignore_errors=True)
        file.write_text(text)
        assert main([*options, "--workers", "1"]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")
        assert message in line


@pytest.fixture
def folder(tokenizer_file: Path, tmp_path: Path) -> Path:
    """Two parts: of five sentences in two documents, and of one."""
    file = tmp_path / "corpus.txt"
    file.write_text("One. Two. Three.\n\nFour. Five.\n\n" + "And a long one, " * 100)
    prepare([file], tokenizer_file, tmp_path / "shards", part_bytes=700)
    return tmp_path / "shards"


def test_the_tokenizer_is_compared(folder: Path, tokenizer_file: Path, tmp_path: Path) -> None:
    copy = tmp_path / "tokenizer.json"
    copy.write_bytes(tokenizer_file.read_bytes())
    Shards.open(folder, copy)
    copy.write_bytes(tokenizer_file.read_bytes() + b"\n")
    with pytest.raises(ShardError, match=f"{folder} was prepared with another .* than {copy}"):
        Shards.open(folder, copy)
    parts = [make_part([[1, 2]], 11), make_part([[3, 3]], 11)]  # ids from 5 to 10
    assert make_shards(*parts).token_counts(11).tolist() == [0, 0, 0, 0, 0, 2, 2, 2, 1, 1, 1]
    with pytest.raises(ShardError, match="token id 10, the vocabulary only 10 tokens"):
        make_shards(*parts).token_counts(10)


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
    "a table": overwrite("documents.npy", [[0], [2], [5]]),
    "no bounds": overwrite("documents.npy", np.zeros(1, np.int64)),
    "no ids": overwrite("tokens.npy", ["text"]),
    "one document for two": overwrite("documents.npy", [0, 5]),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_files_are_named(folder: Path, damage: Callable[[Path], Any]) -> None:
    damage(folder / "part-00000")
    with pytest.raises(ShardError, match=rf"{folder}/part-00000.*\. Delete {folder} and prepare"):
        Shards.open(folder)


def test_a_folder_without_a_valid_list_is_rejected(folder: Path) -> None:
    file = folder / "shards.json"
    changes: list[dict[str, Any]] = [{"format": 3}, {"parts": [{}]}]
    for change in changes:
        file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
        with pytest.raises(
            ShardError, match=rf"{file} is damaged, .*\. Delete {folder} and prepare"
        ):
            Shards.open(folder)
    file.unlink()
    with pytest.raises(ShardError, match=r"shards.json. Create it with albert-serve prepare"):
        Shards.open(folder)


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
            with pytest.raises(ShardError, match=r"is incomplete|has no shards\.json"):
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
        assert (ended.status, ended.err) == (130, "\nStopped. Repeat the command to resume.\n")
    with pytest.raises(ShardError, match=r"is incomplete\. Repeat the command"):
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
    assert (ended.status, ended.err) == (130, "\nStopped. Repeat the command to resume.\n")


def test_a_full_disk_keeps_the_whole_parts(tmp_path: Path, tokenizer_file: Path) -> None:
    corpus, folder, expected = tmp_path / "a.txt", tmp_path / "shards", tmp_path / "expected"
    corpus.write_text("It rained. " * 20 + "\n\n" + "It snowed. " * 5000)
    args = [corpus], tokenizer_file
    message = rf"{folder} cannot be written: .*\. 1 complete parts are saved\. Fix the problem"
    with limited_file_size(10_000), pytest.raises(ShardError, match=message):
        prepare(*args, folder, part_bytes=600)
    with pytest.raises(ShardError, match="is incomplete"):
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

    with pytest.raises(ShardError, match="A worker was killed, probably for lack of memory"):
        list(tokenise(documents(), tokenizer_file, num_workers=2))
