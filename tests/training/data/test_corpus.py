"""Every kind of corpus file is read whole, or refused with the file and the line."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from training.data import corpus as module
from training.data.corpus import (
    CorpusError,
    Place,
    find_files,
    read_documents,
    read_from,
    read_lines,
    split_sentences,
)

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
def test_a_file_cut_short_is_refused(tmp_path: Path, suffix: str) -> None:
    numbers = "".join(f'{{"text": "{number**3}"}}\n' for number in range(50_000))
    content = COMPRESS[suffix](numbers.encode())
    file = write(tmp_path / f"a.jsonl{suffix}", content[: len(content) * 2 // 3])
    with pytest.raises(CorpusError, match=f"a.jsonl{suffix}: .*is the file complete"):
        list(read_documents([file]))


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


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f'{{"text": {"9" * 5000}}}', "not JSON: Exceeds the limit"),
        (f'{{"text": {"[" * 100_000}', "not JSON: "),
        (r'{"text": "half \ud83d of it"}', "half of a surrogate pair in the text"),
    ],
)
def test_a_record_that_would_upset_python_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = write(tmp_path / "a.jsonl", JSONL + line)
    with pytest.raises(CorpusError, match=f"a.jsonl, line 3: {message}"):
        list(read_documents([file]))


def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LINE_CHARACTERS", 100)
    file = write(tmp_path / "a.txt", "é" * 99 + "\n" + "é" * 100)
    lines = read_lines(file)
    assert next(lines) == "é" * 99 + "\n"
    with pytest.raises(CorpusError, match=r"a.txt, line 2: longer than 100 .*; is the file text"):
        next(lines)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet"])
def test_a_long_document_is_cut_at_line_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(module, "_MAX_DOCUMENT_CHARACTERS", 20)
    lines = [f"line {number}" for number in range(10)] + ["x" * 50]
    text = "\n".join(lines)
    if name == "a.parquet":
        parquet.write_table(pyarrow.table({"text": [text, "last"]}), tmp_path / name)
    elif name == "a.jsonl":
        records = ({"text": text}, {"text": "last"})
        (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    else:
        (tmp_path / name).write_text(text + "\n\nlast")
    documents = list(read_documents([tmp_path / name]))
    assert max(map(len, documents)) <= 20
    assert "".join("".join(documents).split()) == "".join(text.split()) + "last"
    pieces = [line for document in documents for line in document.split("\n") if line]
    assert pieces[:10] == lines[:10]
    assert documents[-1] == "last"


def test_folders_are_searched_in_order_without_hidden_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "sub/c.txt", ".hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    files = [tmp_path / name for name in ("a.txt", "b.txt", "sub/c.txt")]
    assert find_files([tmp_path]) == files
    assert find_files([tmp_path / "b.txt", tmp_path]) == [files[1], files[0], files[2]]


TEXT_TYPES: dict[str, Any] = {
    "string": pyarrow.string(),
    "large_string": pyarrow.large_string(),
    "string_view": pyarrow.string_view(),
    "dictionary": pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
}


def write_parquet(file: Path, texts: list[Any], kind: Any = None, **options: Any) -> Path:
    columns = {"id": list(range(len(texts))), "text": pyarrow.array(texts, kind)}
    parquet.write_table(pyarrow.table(columns), file, **options)
    return file


@pytest.mark.parametrize("kind", TEXT_TYPES.values(), ids=TEXT_TYPES)
def test_parquet_holds_the_same_documents(tmp_path: Path, kind: Any) -> None:
    file = write_parquet(tmp_path / "a.parquet", [*DOCUMENTS, " ", ""], kind)
    assert list(read_documents([file])) == DOCUMENTS


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"body": ["a"], "id": [1]}, 'no column "text", only body, id'),
        ({"text": [1]}, "row 1: the text is 1, not a string"),
        ({"text": [b"a"]}, "row 1: the text is b'a', not a string"),
        ({"text": ["a", None]}, "row 2: the text is None, not a string"),
    ],
)
def test_parquet_without_texts_is_refused(
    tmp_path: Path, columns: dict[str, list[Any]], message: str
) -> None:
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    with pytest.raises(CorpusError, match=rf"a.parquet[,:] {message}"):
        list(read_documents([tmp_path / "a.parquet"]))


def test_parquet_cut_short_or_damaged_is_refused(tmp_path: Path) -> None:
    texts = [f"{number**5} text" for number in range(3000)]
    whole = write_parquet(tmp_path / "a.parquet", texts, row_group_size=700).read_bytes()
    middle = len(whole) // 3
    for content in (whole[: 2 * middle], b"", b"text", whole[:middle] + bytes(99) + whole[middle:]):
        file = write(tmp_path / "a.parquet", content)
        with pytest.raises(CorpusError, match=r"a.parquet: .*; is the file complete, and Parquet"):
            list(read_documents([file]))


@pytest.fixture
def one_of_each(tmp_path: Path) -> list[Path]:
    """Files of every format, each of many documents, one of them of none."""
    texts = [f"Document {number}.\nOf two lines." for number in range(300)]
    jsonl = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    files = [
        write(tmp_path / "a.txt", "\n\n".join(texts)),
        write(tmp_path / "b.jsonl", jsonl),
        write(tmp_path / "empty.txt", "\n"),
        write_parquet(tmp_path / "c.parquet", texts, row_group_size=100),
    ]
    return files + [
        write(tmp_path / f"d.jsonl{suffix}", compress(jsonl))
        for suffix, compress in COMPRESS.items()
    ]


def test_reading_goes_on_from_any_place(one_of_each: list[Path]) -> None:
    documents = list(read_from(one_of_each, Place()))
    assert [document.text for document in documents] == list(read_documents(one_of_each))
    for number in (0, 1, 298, 299, 300, 450, 600, 899, 901, len(documents) - 1):
        assert list(read_from(one_of_each, documents[number].end)) == documents[number + 1 :]


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
