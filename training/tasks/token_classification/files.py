"""Texts with entities, and their training windows.

Formats are JSONL and Parquet with tagged words or with character offsets, and CoNLL's columns.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, NamedTuple

from albert_serve.progress import progress
from albert_serve.tables import Row
from albert_serve.tables.columns import find_column
from albert_serve.tables.formats import has_known_suffix
from albert_serve.tasks import TaskSetup, TokenClassification
from albert_serve.tasks.token_classification.entities import OUTSIDE, find_spans, split_tag
from albert_serve.tasks.token_classification.task import WindowedText
from albert_serve.tokenizer import AlbertTokenizer
from training.data.batch import TokenisedExample
from training.data.corpus import CorpusError, find_files, read_lines
from training.data.examples import IGNORED
from training.data.labelled.cells import cell_text, from_utf_16, locate
from training.data.labelled.rows import gather_rows, raise_listed, read_records

_TAGS: Final = ("ner_tags", "tags", "labels")
_IS_TAG: Final = re.compile(rf"{OUTSIDE}|[BIESLUM]-.+").fullmatch
# Matches misspelt tags such as PER-B, B_PER, b-PER and o, and tags without a letter.
_IS_RESEMBLING: Final = re.compile(
    r"(?i:o|[bieslum][-_:/|].*)|.+[-_:/|][BIESLUM]|[\W\d_]*"
).fullmatch
_DOCUMENT: Final = "-DOCSTART-"
_MAX_LOCATIONS: Final = 3


class Entity(NamedTuple):
    """A labelled part of a text, from character `start` to `end`, exclusive."""

    start: int
    end: int
    label: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TaggedText:
    """A text and its entities, in order and without overlaps.

    Attributes:
        words: start and end of each word, or empty if the file does not divide the text into words.
        location: file and line, for messages.
    """

    text: str
    entities: tuple[Entity, ...]
    words: tuple[tuple[int, int], ...] = ()
    location: str = ""

    @property
    def pair(self) -> None:
        """None, because the text is not one of a pair."""

    @property
    def label(self) -> str:
        """The label of the first entity, by which `hold_out` divides texts."""
        return self.entities[0].label if self.entities else OUTSIDE


class _TaggedWords(NamedTuple):
    """Words with their tags and locations (file and line)."""

    words: list[str]
    tags: list[str]
    locations: list[str]


class _Spans(NamedTuple):
    """A text with entities in the order of the file, and the number of repaired offsets."""

    text: str
    entities: list[Entity]
    num_repaired: int
    location: str


def read_tagged(files: Sequence[Path]) -> list[TaggedText]:
    """Read texts with entities, and print the number of faulty entities and tags.

    JSONL, Parquet and Arrow files have rows of `tokens` with `ner_tags` or `tags`, which are names
    or indices of a ClassLabel, or rows of a `text` with `entities` of `start`, `end` and `label`.
    Other files have CoNLL's format: a word per line, its tag in the last column, and a blank line
    after each sentence. In a folder, all files are read. Tags are BIO, IO, BIOES, BILOU or BMES.

    If entities overlap, only the first and longest is used. If an entity's `text` is not at its
    offsets, but can be located, the offsets are corrected.
    """
    errors: list[str] = []
    rows: list[_TaggedWords | _Spans] = gather_rows(
        find_files(files), lambda file: _read(file, errors), "texts", errors
    )
    tagged = [row for row in rows if isinstance(row, _TaggedWords)]
    raise_listed([*errors, *_unknown_tags(tagged)])
    prefixes = {split_tag(tag)[0] for row in tagged for tag in row.tags}
    broken: list[str] = []
    overlapping: list[str] = []
    repaired: list[str] = []
    texts: list[TaggedText] = []
    for row in rows:
        if isinstance(row, _TaggedWords):
            broken += _broken_tags(row, prefixes)
            texts.append(_of_words(row))
        else:
            apart = _without_overlaps(row.entities)
            overlapping += [row.location] * (len(row.entities) - len(apart))
            repaired += [row.location] * row.num_repaired
            texts.append(TaggedText(text=row.text, entities=tuple(apart), location=row.location))
    _report("tags that break their scheme (used unchanged)", broken)
    _report("entities that overlap another entity (ignored)", overlapping)
    _report("entities whose text is not at their offsets (corrected)", repaired)
    return texts


def _report(fault: str, locations: Sequence[str]) -> None:
    """Print the number of faults, and the first locations."""
    if locations:
        shown = "; ".join(dict.fromkeys(locations[:_MAX_LOCATIONS]))
        more = ", ..." if len(locations) > _MAX_LOCATIONS else ""
        print(f"{len(locations):,} {fault}: {shown}{more}")


def label_names(texts: Sequence[TaggedText]) -> list[str]:
    """Return the names of a model's outputs: O, and B- and I- of each label."""
    labels = sorted({entity.label for text in texts for entity in text.entities})
    if not labels:
        raise CorpusError(
            "The texts have no entities. Use texts with entities, or with tags other than O."
        )
    return [OUTSIDE, *(f"{prefix}-{label}" for label in labels for prefix in "BI")]


def _read(file: Path, errors: list[str]) -> Iterator[_TaggedWords | _Spans]:
    if (not has_known_suffix(file) and ".json" not in file.suffixes) or ".tsv" in file.suffixes:
        yield from _read_conll(file, errors)
        return
    for record in read_records(file, errors):
        try:
            yield _of_record(record)
        except ValueError as error:
            errors.append(f"{record.location}: {error}")


def _read_conll(file: Path, errors: list[str]) -> Iterator[_TaggedWords]:
    rows: list[tuple[str, str, str]] = []
    try:
        for number, line in enumerate([*read_lines(file), ""], start=1):
            fields = _columns(line)
            if fields[:1] == ["#"] and "\t" not in line and not _IS_TAG(fields[-1]):
                continue  # a comment, such as `# text = Ada came`
            if len(fields) == 1:
                errors.append(
                    f"{file}, line {number}: The line has one column. It needs a word and its tag."
                )
            elif fields and fields[0] != _DOCUMENT:
                rows.append((fields[0], fields[-1], f"{file}, line {number}"))
            elif rows:
                yield _TaggedWords(*map(list, zip(*rows, strict=True)))
                rows = []
    except (CorpusError, OSError) as error:
        errors.append(str(error))


def _columns(line: str) -> list[str]:
    """Return the columns of a line, divided by tabs or, if there is no tab, by spaces."""
    line = line.strip(" \t\r\n")
    if "\t" in line:
        return [field.strip(" ") for field in line.split("\t")]
    return [field for field in line.split(" ") if field.strip()]


def _unknown_tags(rows: Sequence[_TaggedWords]) -> list[str]:
    """Return an error for each tag that belongs to no scheme, with the tag's first location.

    A file may have labels without prefixes, except labels that look like misspelt tags.
    """
    locations_of: dict[str, list[str]] = {}
    for row in rows:
        for tag, location in zip(row.tags, row.locations, strict=True):
            locations_of.setdefault(tag, []).append(location)
    has_prefixes = any(tag != OUTSIDE and _IS_TAG(tag) for tag in locations_of)
    return [
        f"{locations[0]}: Tag {tag!r} is not in any of the schemes BIO, IO, BIOES, BILOU and BMES "
        f"({len(locations):,} words have it). Use O, and B-LABEL or I-LABEL."
        for tag, locations in locations_of.items()
        if not _IS_TAG(tag) and (has_prefixes or _IS_RESEMBLING(tag))
    ]


def _of_record(record: Row) -> _TaggedWords | _Spans:
    """Return the tagged words of a row, or its text with entities."""
    values = record.values
    tokens, tags = find_column(values, ("tokens",)), find_column(values, _TAGS)
    text, entities = find_column(values, ("text",)), find_column(values, ("entities",))
    if text is not None and entities is not None:
        content = values[text]
        if not isinstance(content, str):
            raise ValueError(f"Column {text} is {content!r:.50}, not a text.")
        spans = [_entity(value, content) for value in values[entities] or ()]
        num_repaired = sum(is_repaired for _, is_repaired in spans)
        return _Spans(content, [entity for entity, _ in spans], num_repaired, record.location)
    if tokens is None or tags is None:
        raise ValueError(
            "The columns are neither tokens with ner_tags or tags, nor text with entities, but "
            f"{', '.join(map(str, values))}."
        )
    words, names = values[tokens], values[tags]
    if not isinstance(words, list) or not isinstance(names, list) or len(words) != len(names):
        raise ValueError(f"Columns {tokens} and {tags} must be lists of the same length.")
    classes = record.classes.get(tags, ())
    return _TaggedWords(
        [cell_text(word) or "" for word in words],
        [_tag(name, classes, tags) for name in names],
        [f"{record.location}, word {number}" for number in range(1, len(words) + 1)],
    )


def _tag(value: Any, classes: Sequence[str], column: str) -> str:
    text = cell_text(value) or ""
    if not text.isdecimal():
        return text or OUTSIDE
    if int(text) >= len(classes):
        raise ValueError(
            f"Column {column} has the number {text}, but the file names {len(classes)} classes. "
            "Use names, or a Parquet file of `datasets` with ClassLabel."
        )
    return classes[int(text)]


def _entity(value: Any, text: str) -> tuple[Entity, bool]:
    """Return an entity without white space around it, and whether its offsets were repaired."""
    fields = value if isinstance(value, Mapping) else {}
    start, end, label = (fields.get(name) for name in ("start", "end", "label"))
    if not isinstance(start, int) or not isinstance(end, int) or not isinstance(label, str):
        raise ValueError(f"{value!r:.80} is not an entity. It needs start, end and label.")
    part = text[start:end] if 0 <= start < end <= len(text) else ""
    entity_text = cell_text(fields.get("text"))
    if entity_text is not None and entity_text != part.strip():
        start = locate(entity_text, text, start)
        return Entity(start, start + len(entity_text), label), True
    if not part.strip():
        raise ValueError(
            f"An entity is from {start} to {end}, but the text has {len(text)} characters."
        )
    if entity_text is None and _are_in_utf_16(start, end, text):
        raise ValueError(
            f"The entity from {start} to {end} starts or ends inside a word, so its offsets seem "
            "to count UTF-16 code units. Count code points, as Python does, or add the "
            '"text" of each entity.'
        )
    left, right = len(part) - len(part.lstrip()), len(part) - len(part.rstrip())
    return Entity(start + left, end - right, label), False


def _are_in_utf_16(start: int, end: int, text: str) -> bool:
    """Return whether offsets split words of a text as code points, but not as UTF-16 code units."""

    def divides(offset: int) -> bool:
        return text[offset - 1 : offset].isalnum() and text[offset : offset + 1].isalnum()

    offsets = from_utf_16(start, text), from_utf_16(end, text)
    return (divides(start) or divides(end)) and not any(map(divides, offsets))


def _of_words(row: _TaggedWords) -> TaggedText:
    starts = list(accumulate((len(word) + 1 for word in row.words), initial=0))
    return TaggedText(
        text=" ".join(row.words),
        words=tuple(
            (start, start + len(word)) for start, word in zip(starts, row.words, strict=False)
        ),
        entities=tuple(
            Entity(starts[span.first], starts[span.last + 1] - 1, span.label)
            for span in find_spans(row.tags)
            if span.label != OUTSIDE
        ),
        location=row.locations[0] if row.locations else "",
    )


def _broken_tags(row: _TaggedWords, prefixes: set[str]) -> Iterator[str]:
    """Yield the locations of tags that continue or end an entity that did not begin.

    If no tag begins an entity, the scheme is IO, in which all tags are valid.
    """
    if not prefixes & {"B", "S"}:
        return
    previous_prefix, previous_label = "", OUTSIDE
    for tag, location in zip(row.tags, row.locations, strict=True):
        prefix, label = split_tag(tag)
        continues = prefix in ("I", "E") and label != OUTSIDE
        if continues and (label != previous_label or previous_prefix in ("E", "S")):
            yield location
        previous_prefix, previous_label = prefix, label


def _without_overlaps(entities: Sequence[Entity]) -> list[Entity]:
    apart: list[Entity] = []
    for entity in sorted(entities, key=lambda entity: (entity.start, -entity.end)):
        if not apart or entity.start >= apart[-1].end:
            apart.append(entity)
    return apart


def token_task(tokenizer: AlbertTokenizer, length: int) -> TokenClassification:
    """Return the service's task, which divides texts into windows of at most `length` tokens."""
    return TokenClassification(TaskSetup(tokenizer=tokenizer, max_positions=length, hidden_size=1))


def words_of(windowed: WindowedText, text: TaggedText) -> list[range]:
    """Return the tokens of each word. The file or, for plain text, the service defines the words.

    A word of a file may have no token.
    """
    if not text.words:
        return windowed.words
    starts = [start for start, _ in windowed.encoding.offsets]
    return [range(*(bisect_left(starts, offset) for offset in word)) for word in text.words]


def word_tags(windowed: WindowedText, text: TaggedText) -> tuple[list[str], int]:
    """Return the BIO tag of each word, and the number of misaligned entities.

    A misaligned entity begins or ends within a word. Words that begin in the entity get its tags.
    """
    offsets = windowed.encoding.offsets
    bounds = text.words or [(offsets[word[0]][0], offsets[word[-1]][1]) for word in windowed.words]
    tags = [OUTSIDE] * len(bounds)
    num_misaligned = 0
    for start, end, label in text.entities:
        inside = [n for n, (begin, _) in enumerate(bounds) if start <= begin < end]
        for number in inside:
            tags[number] = f"{'B' if number == inside[0] else 'I'}-{label}"
        is_aligned = inside and bounds[inside[0]][0] == start and bounds[inside[-1]][1] == end
        num_misaligned += not is_aligned
    return tags, num_misaligned


def token_examples(
    texts: Sequence[TaggedText], tokenizer: AlbertTokenizer, names: Sequence[str], *, length: int
) -> list[TokenisedExample]:
    """Return the windows of texts, and print the locations of misaligned entities.

    The target of a word's first token is the index of its tag, in the window with most text around
    the word. The targets of other tokens are IGNORED.
    """
    task, tag_index = token_task(tokenizer, length), {name: n for n, name in enumerate(names)}
    examples, misaligned = [], []
    for text in progress(texts, title="tokenising texts", unit="texts"):
        if not tokenizer.encode_plain(text.text).ids:
            continue
        windowed = task.split(text.text)
        tags, num_misaligned = word_tags(windowed, text)
        misaligned += [text.location] * num_misaligned
        targets = [IGNORED] * len(windowed.encoding)
        for word, tag in zip(words_of(windowed, text), tags, strict=True):
            if word:
                targets[word.start] = tag_index[tag]
        owners = windowed.windows.window_per_token().tolist()
        for number, (window, (start, end)) in enumerate(
            zip(windowed.inputs, windowed.windows.ranges, strict=True)
        ):
            part = [
                target if owner == number else IGNORED
                for target, owner in zip(targets[start:end], owners[start:end], strict=True)
            ]
            if any(target != IGNORED for target in part):
                target = [IGNORED, *part, IGNORED]
                examples.append(TokenisedExample(ids=window.ids, types=window.types, target=target))
    _report(
        "entities that do not begin and end with words (aligned with words)",
        misaligned,
    )
    return examples
