"""Documents of one file: text, JSON, CSV, Parquet, Arrow, or WikiExtractor's.

A file is what its name says or, where that says nothing, what its content is without doubt.
"""

from __future__ import annotations

import html
import re
import reprlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Final, TypeAlias

from albert_serve.errors import InvalidInputError
from albert_serve.tables import Row, columnar, read_unchecked
from albert_serve.tables.columnar import read_schema
from albert_serve.tables.columns import SINGLES, find_column
from albert_serve.tables.delimited import likely_delimiter
from albert_serve.tables.formats import (
    TableType,
    detect_type,
    has_known_suffix,
    is_utf8,
    open_lines,
)

MAX_DOCUMENT_CHARACTERS: Final = 1 << 22
_JSON: Final = re.compile(r'\s*(\[\s*)?\{\s*"(?:[^"\\]|\\.)*"\s*:')
# Of a name between delimiters, in the first line of a CSV file.
_NAME: Final = re.compile(r'"?\w[\w.# -]{,40}"?')
_WIKI: Final = re.compile(r'\s*<doc id="')
_WIKI_TITLE: Final = re.compile(r'<doc id=.* title="(.*?)"')

# A text, and the number of bytes of the file up to its end.
_Read: TypeAlias = Iterator[tuple[str, int]]
# A place for messages, the columns, and those of texts, to the column of the documents.
_FindColumn: TypeAlias = Callable[[str, Sequence[str], Sequence[str]], str]


def read_file(file: Path, text_column: str | None = None) -> _Read:
    """Yield the documents of a file, each with the number of bytes of the file read so far.

    Args:
        text_column: the field of JSON or column of a table that holds them; None to find it.
    """
    kind = detect_type(file)
    find = partial(_text_column, text_column)
    if kind.is_columnar:
        yield from _read_columnar(file, kind, find)
    elif has_known_suffix(file):
        yield from _read_rows(file, kind, find)
    else:
        with open_lines(file, kind.compression) as lines:
            beginning = lines.beginning
        if "\0" in beginning:
            raise InvalidInputError(
                f"{file} is not text: it has bytes of 0, as binary files and UTF-32 have"
            )
        if ".json" in file.suffixes or _JSON.match(beginning):
            yield from _read_rows(file, kind, find)
        elif _is_table(beginning):
            yield from _read_rows(file, replace(kind, format="csv"), find)
        else:
            yield from (_read_wiki if _WIKI.match(beginning) else _read_text)(file, kind)


def _is_table(beginning: str) -> bool:
    """Whether text begins with a line of names of columns, of which one is usual for texts."""
    line = beginning.lstrip().partition("\n")[0].rstrip()
    delimiter = likely_delimiter(line)
    names = line.split(delimiter) if delimiter else []
    usual = {name.lower() for name, _ in SINGLES}
    return all(map(_NAME.fullmatch, names)) and any(
        name.strip('"').lower() in usual for name in names
    )


def read_lines(file: Path, kind: TableType) -> _Read:
    """Yield the lines of a text file, each with the number of bytes of the file read so far."""
    with open_lines(file, kind.compression) as lines:
        for number, line in enumerate(lines.checked(file), start=1):
            if not is_utf8(line):
                raise InvalidInputError(f"{file}, line {number} is not UTF-8")
            yield line, lines.position()


def _read_text(file: Path, kind: TableType) -> _Read:
    paragraph: list[str] = []
    size = position = 0
    for line, position in read_lines(file, kind):
        line = line.replace("\r\n", "\n")
        if line.strip() and size < MAX_DOCUMENT_CHARACTERS:
            paragraph.append(line)
            size += len(line)
        elif paragraph:
            yield "".join(paragraph), position
            paragraph = [line] if line.strip() else []
            size = sum(map(len, paragraph))
    if paragraph:
        yield "".join(paragraph), position


def _read_wiki(file: Path, kind: TableType) -> _Read:
    """Yield the text between `<doc ...>` and `</doc>`, without the title and HTML's escapes."""
    lines: list[str] | None = None
    title = ""
    for line, position in read_lines(file, kind):
        if match := _WIKI_TITLE.match(line):
            lines, title = [], html.unescape(match[1])
        elif line.strip() == "</doc>":
            yield "".join(lines or ()).strip(), position
            lines = None
        elif lines is not None:
            line = html.unescape(line.replace("\r\n", "\n"))
            lines += [] if not lines and line.strip() == title else [line]
        elif line.strip():
            raise InvalidInputError(f"{file}: {line.strip()[:40]!r} stands outside of <doc ...>")
    if lines is not None:
        raise InvalidInputError(f"{file} is incomplete: its last <doc ...> has no </doc>")


def _read_rows(file: Path, kind: TableType, find: _FindColumn) -> _Read:
    column: str | None = None
    for row in read_unchecked(file, kind):
        if row.error is not None:
            raise InvalidInputError(str(row.error))
        if column is None:
            texts = [name for name, value in row.values.items() if isinstance(value, str)]
            column = find(row.header, list(row.values), texts)
        yield _checked(row, column), row.position


def _read_columnar(file: Path, kind: TableType, find: _FindColumn) -> _Read:
    schema, _ = read_schema(file, kind)
    texts = [field.name for field in schema if "string" in str(field.type)]
    column = find(str(file), schema.names, texts)
    for row in columnar.read_rows(file, kind, [column], before=f"{file}, "):
        yield _checked(row, column), row.position


def _text_column(named: str | None, place: str, names: Sequence[str], texts: Sequence[str]) -> str:
    """Return the column of the documents: one that has a usual name, or the only one of texts.

    Args:
        named: the column in place of these.
        texts: the names of columns that hold texts.
    """
    column = find_column(names, [name for name, _ in SINGLES], named)
    if column is not None:
        return column
    if len(texts) != 1 or named is not None:
        several = f"several columns of texts ({', '.join(texts)})" if texts else "none of texts"
        raise InvalidInputError(
            f'{place}: no column "{named or "text"}", but {several}; --text-column of vocab, '
            f"prepare and pretrain names another; its columns are "
            f"{', '.join(names) or 'none'}"
        )
    _report(texts[0])
    return texts[0]


@cache
def _report(column: str) -> None:
    print(f'the documents of files without a column "text" are those of their only texts: {column}')


def _checked(row: Row, column: str) -> str:
    text = row.values.get(column)
    if not isinstance(text, str):
        raise InvalidInputError(f'{row.place}: "{column}" is {reprlib.repr(text)}, not a string')
    if not text.isascii() and not is_utf8(text):
        raise InvalidInputError(f"{row.place}: half of a surrogate pair in the text, or not UTF-8")
    return text
