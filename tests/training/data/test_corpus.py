"""Corpus files of every format are read completely, or rejected with the file and the line."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pyarrow
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from tests.albert_serve.scoring.jobs import write_dataset
from tests.training.support import write
from training.data.corpus import (
    CorpusError,
    CorpusPosition,
    find_files,
    read_documents,
    read_from,
    split_sentences,
)

DOCUMENTS = [f"Line {number}.\nSecond – line é." for number in range(300)]
JSONL = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in DOCUMENTS)
TEXT = "\n\n" + "\n \n\n".join(DOCUMENTS) + "\n"
CATEGORIES = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


def parquet_bytes(columns: dict[str, Any]) -> bytes:
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table(columns), sink, row_group_size=100)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def read(*files: Path) -> list[str]:
    return [document.text.strip() for document in read_from(files, CorpusPosition())]


def test_documents_of_every_format_can_be_read_from_any_position(tmp_path: Path) -> None:
    """There are files of every format and compression, and an empty file."""
    files = [
        *(
            write(tmp_path / f"{kind}.parquet", parquet_bytes({"text": texts}))
            for kind in (None, pyarrow.string_view(), CATEGORIES)
            for texts in [pyarrow.array([*DOCUMENTS, " ", ""], kind)]
        ),
        write(tmp_path / "windows.txt", b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").encode()),
        write(tmp_path / "empty.txt", "\n"),
        *(
            write(tmp_path / f"{name}{suffix}", compress(content.encode()))
            for suffix, compress in COMPRESS.items()
            for name, content in (("b.txt", TEXT), ("c.jsonl", "\ufeff" + JSONL))
        ),
    ]
    documents = list(read_from(files, CorpusPosition()))
    texts = [document.text.strip() for document in documents]
    assert texts == DOCUMENTS * (len(files) - 1)
    size = sum(file.stat().st_size for file in files)
    positions = [document.end.num_bytes for document in documents]
    assert positions == sorted(positions)
    assert positions[-1] <= size
    for index in (0, 1, 298, 299, 300, 450, 600, 899, 901, len(documents) - 1):
        assert list(read_from(files, documents[index].end)) == documents[index + 1 :]


def test_the_error_of_a_damaged_file_names_it(tmp_path: Path) -> None:
    texts = [f"{number**5} text" for number in range(3000)]
    lines = "".join(f'{{"text": "{text}"}}\n' for text in texts).encode()
    intact = parquet_bytes({"text": texts})
    third = len(intact) // 3
    damaged_files = [("a.parquet", intact[:third] + bytes(99) + intact[third:])]
    damaged_files += [("a.parquet", intact[: 2 * third])]
    for suffix in filter(None, COMPRESS):
        content = COMPRESS[suffix](lines)
        damaged_files += [(f"a.jsonl{suffix}", content[: len(content) * 2 // 3])]
    for name, content in damaged_files:
        with pytest.raises(CorpusError, match=f"{name} is damaged or incomplete"):
            read(write(tmp_path / name, content))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": {"}', "line 301 is not JSON"),
        ("a.jsonl", r'{"text": "\ud800"}', "line 301: .* half of a surrogate pair"),
        ("wiki", '<doc id="1" title="A">\nOne.', "wiki is incomplete: its last <doc ...> has no <"),
        ("a.txt", b"\xff", "a.txt, line 301 is not UTF-8"),
        ("a.bin", b"\0\1", "a.bin is not text: it contains bytes of value 0"),
        ("a.txt", "a" * (1 << 24) + "b", "a.txt, line 301 has more than 16777216 bytes"),
        ("wiki", f'<doc id="1" title="A">\n</doc>\n\n{"a" * 41}', "wiki: 'a{40}' is not inside"),
        ("a.parquet", {"a": ["a"], "b": ["b"]}, r"several columns of texts \(a, b\)\. Set --text"),
        ("a.parquet", {"text": ["a", None]}, 'a.parquet, row 2: "text" is None, not a string'),
    ],
)
def test_bad_content_is_rejected_with_its_location(
    tmp_path: Path, name: str, content: str | bytes | dict[str, Any], message: str
) -> None:
    if isinstance(content, dict):
        content = parquet_bytes(content)
    elif name != "wiki":
        content = content.encode() if isinstance(content, str) else content
        content = (JSONL if name == "a.jsonl" else "\n" * 300).encode() + content
    with pytest.raises(CorpusError, match=message):
        read(write(tmp_path / name, content))


TEXTS: Final = ("One.\n\nTwo.", "Three.")
RECORDS: Final = [{"id": "1", "title": "A & B", "text": text} for text in TEXTS]
LINES: Final = "".join(json.dumps(record) + "\n" for record in RECORDS)
WIKI_DOCUMENT: Final = '<doc id="1" url="u" title="A &amp; B">\nA &amp; B\n\n{}\n</doc>\n'


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("wiki_00", LINES.encode()),
        ("a.json", LINES.encode("utf-16")),
        ("a.jsonl", LINES.encode("utf-16-le")),
        ("b.txt", 'id,Text\n1,"One.\n\nTwo."\n2,Three.\n'.encode("utf-16-be")),
        ("a.json", json.dumps(RECORDS, indent=1).encode()),
        ("a.jsonl", LINES.replace('"text"', '"Text"').encode()),
        ("a.csv", b'id;text\r\n1;"One.\n\nTwo."\r\n2;Three.\r\n'),
        ("a.txt", "One.\n\nTwo.\n\nThree.".encode("utf-16")),
        ("wiki_01", "".join(map(WIKI_DOCUMENT.format, TEXTS)).encode()),
    ],
)
def test_formats_and_encodings_are_detected(tmp_path: Path, name: str, content: bytes) -> None:
    texts = read(write(tmp_path / name, content))
    assert "\n\n".join(texts) == "One.\n\nTwo.\n\nThree."
    assert len(texts) == (3 if name == "a.txt" else 2)


def test_the_text_column_is_the_only_text_column_or_the_specified_column(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert read(write(tmp_path / "a.jsonl", '{"n": 1, "body of it": "One."}')) == ["One."]
    assert "body of it" in capsys.readouterr().out
    columns = {"title": ["A", "B"], "text": ["no", "no"], "Body": ["One.", "Two."]}
    records = [{name: values[row] for name, values in columns.items()} for row in range(2)]
    files = [
        write(tmp_path / "a.csv", "title;text;Body\nA;no;One.\nB;no;Two.\n"),
        write(tmp_path / "a.parquet", parquet_bytes(columns)),
        write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, records))),
    ]
    for file in files:
        assert list(read_documents([file], "body")) == ["One.", "Two."]
        with pytest.raises(CorpusError, match=r'no column "story", but several .* Body\.'):
            list(read_documents([file], "story"))


def test_long_documents_are_split_at_line_ends_if_possible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("corpus", "documents"):
        monkeypatch.setattr(f"training.data.{module}.MAX_DOCUMENT_CHARACTERS", 8)
    records = [{"text": text} for text in ("One\nTwo\nThree and four", "1234\n678", " " * 9)]
    file = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, records)))
    assert read(file) == ["One\nTwo", "Three an", "d four", "1234\n678"]
    text = write(tmp_path / "a.txt", "One\nTwo\nThree\n\n1\n2\n")
    assert read(text) == ["One\nTwo", "Three", "1\n2"]


def test_folders_are_searched_in_order_without_hidden_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "sub/c.txt", ".hidden", ".git/d.txt"):
        write(tmp_path / name, "text")
    files = [tmp_path / name for name in ("a.txt", "b.txt", "sub/c.txt")]
    assert find_files([tmp_path]) == files
    assert find_files([tmp_path / "b.txt", tmp_path]) == [files[1], files[0], files[2]]
    write_dataset(tmp_path / "saved" / "train", pyarrow.table({"text": DOCUMENTS}))
    assert read(*find_files([tmp_path / "saved"])) == DOCUMENTS
    (tmp_path / "empty").mkdir()
    for name, message in (("none", "none does not exist"), ("empty", "There is no file in ")):
        with pytest.raises(CorpusError, match=message):
            find_files([tmp_path / name])


def test_a_sentence_ends_at_the_end_of_its_paragraph() -> None:
    document = "A title\n\nIt  rained.\tDr. Smith left! Why?\n"
    assert split_sentences(document) == ["A title", "It rained.", "Dr. Smith left!", "Why?"]


@given(st.lists(st.sampled_from(["A b. ", "C", "e.g. ", "\n", "\n\n", " ", '"No!" ', "1.5 ", "é"])))
def test_splitting_into_sentences_changes_only_white_space(parts: list[str]) -> None:
    document = "".join(parts)
    sentences = split_sentences(document)
    assert "".join("".join(sentences).split()) == "".join(document.split())
    assert all(sentence == " ".join(sentence.split()) != "" for sentence in sentences)
