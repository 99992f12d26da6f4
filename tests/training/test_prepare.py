"""A corpus is tokenised once; workers and interruptions do not change the shards."""

from __future__ import annotations

import os
import resource
import signal
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from filelock import lock_descriptor

from albert_serve.tokenizer import AlbertTokenizer
from tests.training.processes import (
    die_before_change,
    run_all,
    run_in_process,
    set_part_bytes,
    start,
    start_process_group,
)
from tests.training.support import SMALL_PART, WIKI, file_contents, write
from training.data import tokenization as tokenising
from training.data.corpus import CorpusPosition, read_documents, split_sentences
from training.data.preparation import prepare
from training.data.shard_writer import ShardWriter
from training.data.shards import CorpusManifest, ShardError, Shards
from training.data.tokenization import Tokenised

pytestmark = pytest.mark.process


def test_shards_contain_the_tokens_of_the_text(shards: Shards, tokenizer: AlbertTokenizer) -> None:
    expected = [
        [tokenizer.encode_plain(text).ids for text in split_sentences(document)]
        for document in read_documents([WIKI])
    ]
    (part,) = shards.parts
    documents = [
        [
            part.tokens[begin:end].tolist()
            for begin, end in pairwise(part.sentences[first : last + 1].tolist())
        ]
        for first, last in pairwise(part.documents.tolist())
    ]
    assert documents == expected
    assert part.tokens.dtype == np.uint16


def test_special_tokens_in_a_text_are_ordinary_characters(
    tokenizer_file: Path, tmp_path: Path
) -> None:
    corpus = write(tmp_path / "corpus.txt", "The [SEP] of a [MASK] is [CLS].")
    shards = prepare([corpus], tokenizer_file, tmp_path / "shards")
    assert not {2, 3, 4} & {*shards.parts[0].tokens.tolist()}


def test_each_token_is_counted(shards: Shards, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.data.shards._PIECE_TOKENS", 100)
    (part,) = shards.parts
    vocab_size = int(part.tokens.max()) + 1
    assert part.num_tokens > 200
    assert shards.token_counts(vocab_size).tolist() == np.bincount(part.tokens).tolist()
    with pytest.raises(ShardError, match=f"token id {vocab_size - 1}, the vocabulary only"):
        shards.token_counts(vocab_size - 1)


def test_the_number_of_workers_does_not_change_the_shards(
    tokenizer_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenising, "_CHUNK_CHARACTERS", 1)
    one, two = tmp_path / "one", tmp_path / "two"
    prepare([WIKI], tokenizer_file, one, part_bytes=SMALL_PART)
    prepare([WIKI], tokenizer_file, two, num_workers=2, part_bytes=SMALL_PART)
    assert len(file_contents(one)) > 3 * 4
    assert file_contents(one) == file_contents(two)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(1 << 16, np.uint16), ((1 << 16) + 1, np.int32)])
def test_ids_have_2_bytes_up_to_65536_pieces(tmp_path: Path, vocab_size: int, dtype: type) -> None:
    manifest = CorpusManifest(tokenizer_sha256="", fingerprint="")
    writer = ShardWriter(tmp_path, manifest, part_bytes=1 << 20, vocab_size=vocab_size)
    ids = np.array([5, vocab_size - 1], np.int32)
    writer.write([Tokenised(tokens=ids, lengths=np.array([2], np.int32), end=CorpusPosition())])
    (part,) = Shards.open(tmp_path).parts
    assert part.tokens.dtype == dtype
    assert part.tokens.tolist() == ids.tolist()


def write_shards(folder: Path, *documents: list[int], part_bytes: int = 1 << 20) -> list[int]:
    """Write documents of these sentence lengths, and return the size of each part in bytes."""
    folder.mkdir(exist_ok=True)
    manifest = CorpusManifest(tokenizer_sha256="", fingerprint="")
    ShardWriter(folder, manifest, part_bytes=part_bytes, vocab_size=99).write(
        Tokenised(
            tokens=np.arange(sum(lengths), dtype=np.int32),
            lengths=np.array(lengths, np.int32),
            end=CorpusPosition(),
        )
        for lengths in documents
    )
    parts = sorted(folder.glob("part-*"))
    return [sum(file.stat().st_size for file in part.iterdir()) for part in parts]


def test_a_part_has_at_most_the_set_number_of_bytes(tmp_path: Path) -> None:
    """Documents without sentences are skipped."""
    documents: list[list[int]] = [[3, 4], [], [5]]
    (size,) = write_shards(tmp_path / "large", *documents)
    assert write_shards(tmp_path / "exact", *documents, part_bytes=size) == [size]
    assert len(write_shards(tmp_path / "small", *documents, part_bytes=size - 1)) == 2
    with pytest.raises(ShardError, match="The corpus contains no sentence"):
        write_shards(tmp_path / "empty", [])


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("tokens", np.arange(7)),
        ("sentences", np.array([0, 3, 7], np.int32)),
        ("sentences", np.array([1, 3, 7])),
        ("sentences", np.array([0, 3, 6])),
        ("sentences", np.array([0, 7, 7])),
        ("documents", np.array([0, 1])),
        ("documents", np.array([0, 1, 2])),
    ],
)
def test_a_part_of_arrays_that_contradict_each_other_is_rejected(
    tmp_path: Path, name: str, array: Any
) -> None:
    write_shards(tmp_path, [3, 4])
    Shards.open(tmp_path)
    np.save(tmp_path / f"part-00000/{name}.npy", array)
    with pytest.raises(ShardError, match="files that contradict each other"):
        Shards.open(tmp_path)


def test_a_folder_takes_only_its_corpus_and_tokenizer(tokenizer_file: Path, tmp_path: Path) -> None:
    """The names, sizes, and first and last MiB of files count, and the column and size of parts."""
    corpus, folder, gap = tmp_path / "corpus.txt", tmp_path / "shards", " " * ((1 << 20) - 7)
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
    moved = write(tmp_path / "elsewhere/corpus.txt", text.replace("Two.\nThree.", "Six.\nSeven."))
    prepare([moved], tokenizer_file, folder)
    assert file_contents(folder) == before
    copy = write(tmp_path / "tokenizer.json", tokenizer_file.read_bytes())
    Shards.open(folder, copy)
    write(copy, tokenizer_file.read_bytes() + b"\n")
    with pytest.raises(ShardError, match=f"{folder} was prepared with another .* than {copy}"):
        Shards.open(folder, copy)


def test_only_one_process_at_a_time_prepares_a_folder(tokenizer_file: Path, tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    assert lock_descriptor(descriptor, blocking=False)
    with pytest.raises(ShardError, match=f"Another process is preparing {tmp_path}"):
        prepare([WIKI], tokenizer_file, tmp_path)
    os.close(descriptor)


PREPARE: Final = "training.commands.prepare"


def test_preparation_killed_before_any_file_change_resumes_to_the_same_shards(
    tmp_path: Path, tokenizer_file: Path
) -> None:
    corpus, expected = tmp_path / "a.txt", tmp_path / "expected"
    corpus.write_text("\n\n".join(["It rained. " * 20, "It snowed. " * 25]))
    assert len(prepare([corpus], tokenizer_file, expected, part_bytes=600).parts) == 2
    options = ["--corpus", str(corpus), "--tokenizer", str(tokenizer_file.parent), "--workers", "1"]
    for number in count(1):
        folder = tmp_path / str(number)
        kill = partial(die_before_change, number, folder)
        hook = partial(run_all, partial(set_part_bytes, 600), kill)
        ended = run_in_process(options, folder, hook=hook, program=PREPARE)
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


def check_resumes(corpus: Path, tokenizer_file: Path, folder: Path, part_bytes: int) -> None:
    """Check that preparation resumes to the same shards, and does not repeat the first part."""
    with pytest.raises(ShardError, match=r"is incomplete\. Repeat the command"):
        Shards.open(folder)
    first_part, expected = folder / "part-00000" / "tokens.npy", folder.with_name("expected")
    modification_time = first_part.stat().st_mtime_ns
    for target in (folder, expected):
        prepare([corpus], tokenizer_file, target, part_bytes=part_bytes)
    assert first_part.stat().st_mtime_ns == modification_time
    assert file_contents(folder) == file_contents(expected)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_preparation_stopped_while_its_workers_run_resumes(
    tokenizer_file: Path, tmp_path: Path, number: signal.Signals
) -> None:
    folder, corpus = tmp_path / "shards", tmp_path / "corpus.jsonl"
    corpus.write_text(WIKI.read_text() * 20)
    options = ["--corpus", str(corpus), "--tokenizer", str(tokenizer_file.parent), "--workers", "2"]
    hook = partial(run_all, start_process_group, partial(set_part_bytes, SMALL_PART))
    started = start(options, folder, hook=hook, program=PREPARE)
    started.wait_for(folder / "partial.json")
    if number is signal.SIGKILL:
        started.send(number)
    else:
        os.killpg(started.process.pid or 0, number)
    ended = started.wait()
    if number is signal.SIGINT:
        assert (ended.status, ended.err) == (130, "\nStopped. Repeat the command to resume.\n")
    check_resumes(corpus, tokenizer_file, folder, SMALL_PART)


def test_complete_parts_remain_after_a_full_disk(tmp_path: Path, tokenizer_file: Path) -> None:
    folder = tmp_path / "shards"
    corpus = write(tmp_path / "a.txt", "It rained. " * 20 + "\n\n" + "It snowed. " * 5000)
    saved = r"1 complete parts are saved\. Fix the problem"
    message = rf"{folder} cannot be written: File too large\. {saved}"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(ShardError, match=message):
            prepare([corpus], tokenizer_file, folder, part_bytes=600)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    check_resumes(corpus, tokenizer_file, folder, 600)
