"""Texts with entities: JSONL and Parquet, of words with tags or of characters; CoNLL's columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, NamedTuple

from albert_serve.tables import Row
from albert_serve.tables.columns import find_column
from albert_serve.tables.formats import has_known_suffix
from albert_serve.tasks.token_classification.entities import OUTSIDE, find_spans, split_tag
from training.data.corpus import CorpusError, find_files, read_lines
from training.data.labelled.cells import cell_text
from training.data.labelled.errors import raise_listed
from training.data.labelled.tables import RowError, gather_rows, read_records

_TAGS: Final = ("ner_tags", "tags", "labels")
_DOCUMENT: Final = "-DOCSTART-"
_SHOWN_PLACES: Final = 3


class Entity(NamedTuple):
    """A labelled part of a text, in characters; the end is excluded."""

    start: int
    end: int
    label: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TaggedText:
    """A text and its entities, in its order and without overlaps.

    Attributes:
        place: file and line, for messages.
    """

    text: str
    entities: tuple[Entity, ...]
    place: str = ""

    @property
    def pair(self) -> None:
        """The second text, which there is none."""

    @property
    def label(self) -> str:
        """The label of its first entity, by which texts are divided."""
        return self.entities[0].label if self.entities else OUTSIDE


class _TaggedWords(NamedTuple):
    """Words with their tags, and the place of each."""

    words: list[str]
    tags: list[str]
    places: list[str]


class _Spans(NamedTuple):
    """A text with entities as the file has them."""

    text: str
    entities: list[Entity]
    place: str


def read_tagged(files: Sequence[Path]) -> list[TaggedText]:
    """Read texts with entities, and print how many entities and tags are not as they should be.

    JSONL, Parquet and Arrow files have rows of `tokens` with `ner_tags` or `tags`, which are names
    or numbers of a ClassLabel, or rows of a `text` with `entities` of `start`, `end` and `label`.
    Other files are CoNLL's: a word a line, its tag in the last column, a blank line after each
    sentence. In place of a folder stand its files. Tags are BIO, BIOES or IO.

    Of entities that overlap, the first and longest stays.

    Raises:
        CorpusError: files cannot be read or are not in such a form, or there is no text; all of it
            is listed.
    """
    errors: list[str] = []
    rows: list[_TaggedWords | _Spans] = gather_rows(find_files(files), _read, "texts", errors)
    raise_listed(errors)
    prefixes = {
        split_tag(tag)[0] for row in rows if isinstance(row, _TaggedWords) for tag in row.tags
    }
    broken: list[str] = []
    overlapping: list[str] = []
    texts: list[TaggedText] = []
    for row in rows:
        if isinstance(row, _TaggedWords):
            broken += _broken_tags(row, prefixes)
            texts.append(_of_words(row))
        else:
            apart = _without_overlaps(row.entities)
            overlapping += [row.place] * (len(row.entities) - len(apart))
            texts.append(TaggedText(text=row.text, entities=tuple(apart), place=row.place))
    tell("tags that break their scheme, and are read as they stand", broken)
    tell("entities that overlap another one, and are left out", overlapping)
    return texts


def tell(fault: str, places: Sequence[str]) -> None:
    """Print how many faults there are, and the places of the first ones."""
    if places:
        shown = "; ".join(dict.fromkeys(places[:_SHOWN_PLACES]))
        more = ", ..." if len(places) > _SHOWN_PLACES else ""
        print(f"{fault}: {len(places):,}, at {shown}{more}")


def label_names(texts: Sequence[TaggedText]) -> list[str]:
    """Return the tags of a model of these texts: O, and B- and I- of each label.

    Raises:
        CorpusError: there is no entity.
    """
    labels = sorted({entity.label for text in texts for entity in text.entities})
    if not labels:
        raise CorpusError("no text has an entity; tags other than O, or entities, are needed")
    return [OUTSIDE, *(f"{prefix}-{label}" for label in labels for prefix in "BI")]


def _read(file: Path) -> Iterator[_TaggedWords | _Spans | RowError]:
    if (not has_known_suffix(file) and ".json" not in file.suffixes) or ".tsv" in file.suffixes:
        yield from _read_conll(file)
        return
    for record in read_records(file):
        if isinstance(record, RowError):
            yield record
            continue
        try:
            yield _of_record(record)
        except ValueError as error:
            yield RowError(f"{record.place}: {error}")


def _read_conll(file: Path) -> Iterator[_TaggedWords | RowError]:
    rows: list[tuple[str, str, str]] = []
    try:
        for number, line in enumerate([*read_lines(file), ""], start=1):
            fields = line.split()
            if len(fields) == 1:
                yield RowError(f"{file}, line {number}: one column; a word and its tag are needed")
            elif fields and fields[0] != _DOCUMENT:
                rows.append((fields[0], fields[-1], f"{file}, line {number}"))
            elif rows:
                yield _TaggedWords(*map(list, zip(*rows, strict=True)))
                rows = []
    except (CorpusError, OSError) as error:
        yield RowError(str(error))


def _of_record(record: Row) -> _TaggedWords | _Spans:
    """Return the text of a row.

    Raises:
        ValueError: it is in none of the forms.
    """
    values = record.values
    tokens, tags = find_column(values, ("tokens",)), find_column(values, _TAGS)
    text, entities = find_column(values, ("text",)), find_column(values, ("entities",))
    if text is not None and entities is not None:
        content = values[text]
        if not isinstance(content, str):
            raise ValueError(f"{text} is {content!r:.50}, not a text")
        spans = [_entity(each, content) for each in values[entities] or ()]
        return _Spans(content, spans, record.place)
    if tokens is None or tags is None:
        raise ValueError(
            "neither tokens with ner_tags or tags, nor text with entities; its columns are "
            + ", ".join(map(str, values))
        )
    words, names = values[tokens], values[tags]
    if not isinstance(words, list) or not isinstance(names, list) or len(words) != len(names):
        raise ValueError(f"{tokens} and {tags} must be lists of the same length")
    classes = record.classes.get(tags, ())
    return _TaggedWords(
        [cell_text(word) or "" for word in words],
        [_tag(name, classes, tags) for name in names],
        [f"{record.place}, word {number}" for number in range(1, len(words) + 1)],
    )


def _tag(value: Any, classes: Sequence[str], column: str) -> str:
    text = cell_text(value) or ""
    if not text.isdecimal():
        return text or OUTSIDE
    if int(text) >= len(classes):
        raise ValueError(
            f"{column} holds the number {text}, and the file names {len(classes)} classes; write "
            "names, or a Parquet file of `datasets` with ClassLabel"
        )
    return classes[int(text)]


def _entity(value: Any, text: str) -> Entity:
    """Return an entity without white space around it."""
    known = value if isinstance(value, Mapping) else {}
    start, end, label = (known.get(name) for name in ("start", "end", "label"))
    if not isinstance(start, int) or not isinstance(end, int) or not isinstance(label, str):
        raise ValueError(f"an entity is {value!r:.80}; it needs start, end and label")
    if not 0 <= start < end <= len(text) or not text[start:end].strip():
        raise ValueError(f"no text from {start} to {end}, where an entity is; it has {len(text)}")
    part = text[start:end]
    left, right = len(part) - len(part.lstrip()), len(part) - len(part.rstrip())
    return Entity(start + left, end - right, label)


def _of_words(row: _TaggedWords) -> TaggedText:
    starts = list(accumulate((len(word) + 1 for word in row.words), initial=0))
    return TaggedText(
        text=" ".join(row.words),
        entities=tuple(
            Entity(starts[span.first], starts[span.last + 1] - 1, span.label)
            for span in find_spans(row.tags)
            if span.label != OUTSIDE
        ),
        place=row.places[0] if row.places else "",
    )


def _broken_tags(row: _TaggedWords, prefixes: set[str]) -> Iterator[str]:
    """Yield the places of tags that go on or end an entity that did not begin.

    Without any tag that begins an entity the scheme is IO, in which each may be the first.
    """
    if not prefixes & {"B", "S"}:
        return
    prefix_before, label_before = "", OUTSIDE
    for tag, place in zip(row.tags, row.places, strict=True):
        prefix, label = split_tag(tag)
        goes_on = prefix in ("I", "E") and label != OUTSIDE
        if goes_on and (label != label_before or prefix_before in ("E", "S")):
            yield place
        prefix_before, label_before = prefix, label


def _without_overlaps(entities: Sequence[Entity]) -> list[Entity]:
    apart: list[Entity] = []
    for entity in sorted(entities, key=lambda one: (one.start, -one.end)):
        if not apart or entity.start >= apart[-1].end:
            apart.append(entity)
    return apart
