"""Atomic replacement of folders, names of models, small files, and the columns of tables."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from albert_serve.errors import InvalidInputError
from albert_serve.files import local_path, read_small_file, replace_folder
from albert_serve.tables import ReadOptions
from albert_serve.tables.columns import LABELS, PAIRS, SINGLES, find_column, find_texts
from albert_serve.tables.delimited import open_table
from albert_serve.tables.formats import open_lines

NAME = "bundle"


def test_a_folder_is_replaced_completely_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "new" / NAME
    with pytest.raises(FileNotFoundError), replace_folder(target) as folder:
        (folder / "missing").rename(folder / "file")
    assert list(target.parent.iterdir()) == []
    for content in ("1", "2"):
        with replace_folder(target) as folder:
            (folder / "file").write_text(content)
        assert list(target.parent.iterdir()) == [target]
        assert (target / "file").read_text() == content


def test_all_content_is_on_disk_before_the_folder_is_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So after a crash the folder is complete, or it does not exist."""
    synced: set[str] = set()

    def fsync(descriptor: int) -> None:
        if not (tmp_path / NAME).exists():
            synced.add(Path(f"/dev/fd/{descriptor}").resolve().name)

    monkeypatch.setattr("os.fsync", fsync)
    with replace_folder(tmp_path / NAME) as folder:
        (folder / "part").mkdir()
        (folder / "part/file").write_text("1")
    assert synced == {"part", "file", folder.name}


def test_a_reference_to_a_model_is_a_path_or_a_name_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    for path in ("./us/model", "/model", "~/model", "us/model/", "here/model", "us/best"):
        assert local_path(path) == Path(path).expanduser()
    for name in ("us/model", "model", "us/bestest"):
        assert local_path(name) is None


def test_reading_a_small_file_has_a_limit_of_bytes(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("123")
    assert read_small_file(tmp_path / "file", 3) == b"123"
    with pytest.raises(OSError, match="more than 2 bytes"):
        read_small_file(tmp_path / "file", 2)


# A cell with both tabs and line breaks could look like several rows.
CELLS = st.one_of(st.text('ab" \n', max_size=6), st.text('ab"\t', max_size=6))
ROWS = st.lists(st.lists(CELLS, min_size=2, max_size=2), max_size=5)


def read(file: Path, content: str, *, has_quotes: bool = True) -> list[tuple[int, list[str]]]:
    file.write_bytes(content.encode())
    with open_lines(file) as lines:
        table = open_table(file, lines, "tsv", ReadOptions(has_quotes=has_quotes))
        return [(table.header, list(table.names)), *table.cells]


@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
def test_quoted_tsv_of_the_csv_module_is_read_correctly(
    tmp_path_factory: pytest.TempPathFactory, quoting: int
) -> None:
    file = tmp_path_factory.mktemp("rows") / "a.tsv"

    @settings(deadline=None, max_examples=60)
    @given(ROWS)
    def check(rows: list[list[str]]) -> None:
        stream = io.StringIO(newline="")
        table = [["a", "b"], *rows]
        csv.writer(stream, "excel-tab", quoting=quoting).writerows(table)  # type: ignore[arg-type]
        assert [cells for _, cells in read(file, stream.getvalue())] == table

    check()


@pytest.mark.parametrize(
    "lines",
    [
        ["text\tlabel", '"It rains.\t1', 'He said "no"\t0', '"Yes," he said.\t1', 'Why?"\t0'],
        ["label\ttext", '1\t"It rains.', '0\tHe said "no"', '1\t"Yes."', '0\t"Why?', '1\tNo."', ""],
        ["a\tb\tc", '"one"\t"two', "short\trow", 'three"\tx\ty', '"a\t"b\tc\td'],
    ],
)
def test_unpaired_quotes_in_tsv_are_ordinary_characters(tmp_path: Path, lines: list[str]) -> None:
    expected = [(n, line.split("\t")) for n, line in enumerate(lines, start=1) if line]
    content = "\n".join(lines) + "\n"
    assert read(tmp_path / "a.tsv", content) == expected
    assert read(tmp_path / "a.tsv", content, has_quotes=False) == expected


def test_a_quoted_field_of_tsv_has_at_most_1000_line_breaks(tmp_path: Path) -> None:
    content = 'id\ttext\n1\t"One.\n\nTwo ""2""."\n2\tThree.\n'
    rows = [(1, ["id", "text"]), (2, ["1", 'One.\n\nTwo "2".']), (5, ["2", "Three."])]
    assert read(tmp_path / "a.tsv", content) == rows
    one_column = [(1, ["text"]), (2, ["One.\nTwo."]), (4, ["Three."])]
    assert read(tmp_path / "a.tsv", 'text\n"One.\nTwo."\nThree.\n') == one_column
    for num_lines in (1000, 1001):
        field = '"' + "\n" * num_lines + '"'
        rows = read(tmp_path / "a.tsv", f"id\ttext\n1\t{field}\n2\tb\n")
        assert (len(rows) == 3) is (num_lines == 1000)
        assert rows[-1] == (num_lines + 3, ["2", "b"])


def test_columns_are_found_by_usual_or_requested_names_in_any_case() -> None:
    for names, text, pair, expected in (
        (["sentence2", "sentence1"], None, None, ("sentence1", "sentence2")),
        (["sentence", "question"], None, None, ("question", "sentence")),
        (["id", " Text "], None, None, (" Text ", None)),
        (["text", "text_pair", "note"], None, "note", ("text", "note")),
        (["text", "note"], "note", None, ("note", None)),
        (["text", "note"], "none", None, None),
        (["text"], "text", "text", None),
    ):
        assert find_texts(names, [*PAIRS, *SINGLES], text, pair) == expected
    assert find_column(["score", "Category"], LABELS) == "Category"
    assert find_column(["score", "Category"], LABELS, "SCORE") == "score"
    assert find_column(["score"], LABELS, "label") is None
    with pytest.raises(InvalidInputError, match="'Label' and 'LABEL' differ only in case"):
        find_column(["Label", "LABEL"], LABELS)
