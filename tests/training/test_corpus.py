"""Every kind of corpus file is read whole, or refused with the file and the line."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from training.corpus import CorpusError, find_files, read_documents, split_sentences

DOCUMENTS = ["First line.\nSecond – line é.", "Another document."]
JSONL = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in DOCUMENTS)


def zstd(content: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(content)


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".zst": zstd,
}
each_compression = pytest.mark.parametrize("suffix", COMPRESS)


def write(file: Path, content: bytes | str) -> Path:
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


def test_jsonl_and_text_hold_the_same_documents(tmp_path: Path) -> None:
    jsonl = write(tmp_path / "a.jsonl", JSONL)
    text = write(tmp_path / "a.txt", "\n\n" + "\n \n\n".join(DOCUMENTS) + "\n")
    assert list(read_documents([jsonl])) == DOCUMENTS
    assert [document.strip() for document in read_documents([text])] == DOCUMENTS
    assert len(list(read_documents([jsonl, text]))) == 4


@each_compression
def test_compressed_files_are_read(tmp_path: Path, suffix: str) -> None:
    jsonl = write(tmp_path / f"a.jsonl{suffix}", COMPRESS[suffix](JSONL.encode()))
    text = write(tmp_path / f"a.txt{suffix}", COMPRESS[suffix]("\n\n".join(DOCUMENTS).encode()))
    assert list(read_documents([jsonl])) == DOCUMENTS
    assert [document.strip() for document in read_documents([text])] == DOCUMENTS


@each_compression
def test_files_put_one_after_another_are_read_to_the_end(tmp_path: Path, suffix: str) -> None:
    part = COMPRESS[suffix](JSONL.encode())
    file = write(tmp_path / f"a.jsonl{suffix}", part + part)
    assert list(read_documents([file])) == DOCUMENTS * 2


@each_compression
def test_a_file_cut_short_is_refused(tmp_path: Path, suffix: str) -> None:
    numbers = "".join(f'{{"text": "{number**3}"}}\n' for number in range(50_000))
    content = COMPRESS[suffix](numbers.encode())
    file = write(tmp_path / f"a.jsonl{suffix}", content[: len(content) * 2 // 3])
    with pytest.raises(CorpusError, match=f"a.jsonl{suffix}: .*is the file complete"):
        list(read_documents([file]))


@each_compression
def test_a_file_of_another_format_is_refused(tmp_path: Path, suffix: str) -> None:
    file = write(tmp_path / f"a.txt{suffix}", "plain text under a wrong name")
    with pytest.raises(CorpusError, match=f"a.txt{suffix}: "):
        list(read_documents([file]))


def test_a_large_zstd_file_is_read_across_its_chunks(tmp_path: Path) -> None:
    lines = [f"{number**3} – é" for number in range(100_000)]
    content = "".join(json.dumps({"text": line}, ensure_ascii=False) + "\n" for line in lines)
    file = write(tmp_path / "a.jsonl.zst", zstd(content.encode()))
    assert list(read_documents([file])) == lines


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.zst"])
def test_a_byte_order_mark_is_passed_over(tmp_path: Path, name: str) -> None:
    content = b"\xef\xbb\xbf" + JSONL.encode()
    file = write(tmp_path / name, zstd(content) if name.endswith("zst") else content)
    assert list(read_documents([file])) == DOCUMENTS


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", "line 3: not JSON"),
        ('{"title": "no text"}', 'line 3: no "text" field'),
        ('{"text": 5}', 'line 3: no "text" field that is a string'),
        ('"text"', 'line 3: no "text" field'),
    ],
)
def test_a_bad_record_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = write(tmp_path / "a.jsonl", JSONL + line + "\n")
    with pytest.raises(CorpusError, match=f"a.jsonl, {message}"):
        list(read_documents([file]))


def test_empty_records_and_lines_are_passed_over(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", '\n{"text": "  "}\n' + JSONL)
    assert list(read_documents([file])) == DOCUMENTS


def test_bytes_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", "café".encode("latin-1"))
    with pytest.raises(CorpusError, match=r"a\.txt: .*UTF-8"):
        list(read_documents([file]))


def test_folders_are_searched_in_order_without_hidden_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "sub/c.txt", ".hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    found = [tmp_path / name for name in ("a.txt", "b.txt", "sub/c.txt")]
    assert find_files([tmp_path]) == found
    assert find_files([tmp_path / "b.txt", tmp_path]) == [found[1], found[0], found[2]]


def test_paths_without_a_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="none does not exist"):
        find_files([tmp_path / "none"])
    with pytest.raises(CorpusError, match=f"no file in {tmp_path}"):
        find_files([tmp_path])


def test_sentences_end_with_their_paragraph() -> None:
    document = "A title\n\nIt  rained.\tDr. Smith left! Why?\n"
    assert split_sentences(document) == [
        "A title",
        "It rained.",
        "Dr. Smith left!",
        "Why?",
    ]


@given(st.lists(st.sampled_from(["A b. ", "C", "e.g. ", "\n", "\n\n", " ", '"No!" ', "1.5 ", "é"])))
def test_no_character_but_white_space_is_lost(parts: list[str]) -> None:
    document = "".join(parts)
    sentences = split_sentences(document)
    assert "".join("".join(sentences).split()) == "".join(document.split())
    assert all(sentence == " ".join(sentence.split()) != "" for sentence in sentences)
