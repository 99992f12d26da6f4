"""Quotes between tabs are read as whoever wrote the file meant them."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from albert_serve.tables import ReadOptions
from albert_serve.tables.delimited import open_table
from albert_serve.tables.formats import open_lines

# A cell with tabs and line ends both would look like rows of its own.
CELLS = st.one_of(st.text('ab" \n', max_size=6), st.text('ab"\t', max_size=6))
ROWS = st.lists(st.lists(CELLS, min_size=2, max_size=2), max_size=5)


def read(file: Path, content: str, *, has_quotes: bool = True) -> list[tuple[int, list[str]]]:
    file.write_bytes(content.encode())
    with open_lines(file) as lines:
        table = open_table(file, lines, "tsv", ReadOptions(has_quotes=has_quotes))
        return [(table.header, list(table.names)), *table.cells]


@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
def test_quoted_tsv_is_read_as_it_was_written(
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
        ["a\tb\tc", '"one"\t"two', "short\trow", 'three"\tx\ty'],
    ],
)
def test_quotes_of_text_between_tabs_are_ordinary(tmp_path: Path, lines: list[str]) -> None:
    plain = [(n, line.split("\t")) for n, line in enumerate(lines, start=1) if line]
    content = "\n".join(lines) + "\n"
    assert read(tmp_path / "a.tsv", content) == plain
    assert read(tmp_path / "a.tsv", content, has_quotes=False) == plain


def test_a_quoted_row_of_several_lines_is_one(tmp_path: Path) -> None:
    content = 'id\ttext\n1\t"One.\n\nTwo ""2""."\n2\tThree.\n'
    rows = [(1, ["id", "text"]), (2, ["1", 'One.\n\nTwo "2".']), (5, ["2", "Three."])]
    assert read(tmp_path / "a.tsv", content) == rows
