"""Documents of one file: text, JSON, CSV, Parquet, Arrow, or WikiExtractor's output.

The suffix of a file determines its format. If the suffix is not known, the beginning does.
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
# Matches a column name, as it is written between the delimiters of a CSV header.
_NAME: Final = re.compile(r'"?\w[\w.# -]{,40}"?')
_WIKI: Final = re.compile(r'\s*<doc id="')
_WIKI_TITLE: Final = re.compile(r'<doc id=.* title="(.*?)"')

# Texts, each with the number of the file's bytes up to the end of the text.
_Read: TypeAlias = Iterator[tuple[str, int]]
# Function from (location for messages, all columns, columns of texts) to the documents' column.
_FindColumn: TypeAlias = Callable[[str, Sequence[str], Sequence[str]], str]


def read_file(file: Path, text_column: str | None = None) -> _Read:
    """Yield the documents of a file, each with the number of bytes read so far.

    Args:
        text_column: JSON field or column that contains the documents, or None to detect it.
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
                f"{file} is not text: it contains bytes of value 0. Convert it to UTF-8."
            )
        if ".json" in file.suffixes or _JSON.match(beginning):
            yield from _read_rows(file, kind, find)
        elif _is_table(beginning):
            yield from _read_rows(file, replace(kind, format="csv"), find)
        else:
            yield from (_read_wiki if _WIKI.match(beginning) else _read_text)(file, kind)


def _is_table(beginning: str) -> bool:
    """Return whether a text begins with a line of column names, one of which is usual for texts."""
    line = beginning.lstrip().partition("\n")[0].rstrip()
    delimiter = likely_delimiter(line)
    names = line.split(delimiter) if delimiter else []
    usual = {name.lower() for name, _ in SINGLES}
    return all(map(_NAME.fullmatch, names)) and any(
        name.strip('"').lower() in usual for name in names
    )


def read_lines(file: Path, kind: TableType) -> _Read:
    """Yield the lines of a text file, each with the number of bytes read so far."""
    with open_lines(file, kind.compression) as lines:
        for number, line in enumerate(lines.checked(file), start=1):
            if not is_utf8(line):
                raise InvalidInputError(f"{file}, line {number} is not UTF-8. Convert the file.")
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
    """Yield the text of each `<doc ...>`, without its title and with HTML escapes replaced."""
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
            raise InvalidInputError(f"{file}: {line.strip()[:40]!r} is not inside <doc ...>.")
    if lines is not None:
        raise InvalidInputError(f"{file} is incomplete: its last <doc ...> has no </doc>.")


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
    for row in columnar.read_rows(file, kind, [column], prefix=f"{file}, "):
        yield _checked(row, column), row.position


def _text_column(
    requested: str | None, location: str, names: Sequence[str], texts: Sequence[str]
) -> str:
    """Return the documents' column: the requested or usual one, or the only column of texts.

    Args:
        requested: name of the column in the options, or None to detect it.
        location: file, or file and line, for messages.
        names: names of all columns.
        texts: names of the columns of texts.
    """
    column = find_column(names, [name for name, _ in SINGLES], requested)
    if column is not None:
        return column
    if len(texts) != 1 or requested is not None:
        candidates = (
            f"several columns of texts ({', '.join(texts)})" if texts else "no column of texts"
        )
        raise InvalidInputError(
            f'{location}: There is no column "{requested or "text"}", but {candidates}. Set '
            "--text-column of vocab, prepare or pretrain to one of its columns: "
            f"{', '.join(names) or 'none'}."
        )
    _report_column(texts[0])
    return texts[0]


@cache
def _report_column(column: str) -> None:
    print(f'There is no column "text", so the only column of texts, "{column}", is read.')


def _checked(row: Row, column: str) -> str:
    text = row.values.get(column)
    if not isinstance(text, str):
        raise InvalidInputError(
            f'{row.location}: "{column}" is {reprlib.repr(text)}, not a string.'
        )
    if not text.isascii() and not is_utf8(text):
        raise InvalidInputError(
            f"{row.location}: The text is not UTF-8, or has half of a surrogate pair."
        )
    return text
