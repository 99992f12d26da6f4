"""Texts with entities, and their training windows.

Files are JSONL and Parquet, of words with tags or of characters, and CoNLL's columns.
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
# PER-B, B_PER, b-PER, o, and what has no letter.
_IS_RESEMBLING: Final = re.compile(
    r"(?i:o|[bieslum][-_:/|].*)|.+[-_:/|][BIESLUM]|[\W\d_]*"
).fullmatch
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
        words: start and end of each word of a file of words; none of plain text.
        place: file and line, for messages.
    """

    text: str
    entities: tuple[Entity, ...]
    words: tuple[tuple[int, int], ...] = ()
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
    """A text with entities as the file has them, and the number of repaired offsets."""

    text: str
    entities: list[Entity]
    num_repaired: int
    place: str


def read_tagged(files: Sequence[Path]) -> list[TaggedText]:
    """Read texts with entities, and print how many entities and tags are not as they should be.

    JSONL, Parquet and Arrow files have rows of `tokens` with `ner_tags` or `tags`, which are names
    or numbers of a ClassLabel, or rows of a `text` with `entities` of `start`, `end` and `label`.
    Other files are CoNLL's: a word a line, its tag in the last column, a blank line after each
    sentence. In place of a folder stand its files. Tags are BIO, IO, BIOES, BILOU or BMES.

    Of entities that overlap, the first and longest stays. An entity whose own `text` is not at its
    offsets is repaired if it can be located.
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
            overlapping += [row.place] * (len(row.entities) - len(apart))
            repaired += [row.place] * row.num_repaired
            texts.append(TaggedText(text=row.text, entities=tuple(apart), place=row.place))
    _tell("tags that break their scheme, and are read as they stand", broken)
    _tell("entities that overlap another one, and are left out", overlapping)
    _tell("entities at other offsets than their text, and located by it", repaired)
    return texts


def _tell(fault: str, places: Sequence[str]) -> None:
    """Print how many faults there are, and the places of the first ones."""
    if places:
        shown = "; ".join(dict.fromkeys(places[:_SHOWN_PLACES]))
        more = ", ..." if len(places) > _SHOWN_PLACES else ""
        print(f"{fault}: {len(places):,}, at {shown}{more}")


def label_names(texts: Sequence[TaggedText]) -> list[str]:
    """Return the tags of a model of these texts: O, and B- and I- of each label."""
    labels = sorted({entity.label for text in texts for entity in text.entities})
    if not labels:
        raise CorpusError("no text has an entity; tags other than O, or entities, are needed")
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
                errors.append(f"{file}, line {number}: one column; a word and its tag are needed")
            elif fields and fields[0] != _DOCUMENT:
                rows.append((fields[0], fields[-1], f"{file}, line {number}"))
            elif rows:
                yield _TaggedWords(*map(list, zip(*rows, strict=True)))
                rows = []
    except (CorpusError, OSError) as error:
        errors.append(str(error))


def _columns(line: str) -> list[str]:
    """Return the columns of a line: divided by tabs only if it has any, otherwise by spaces."""
    line = line.strip(" \t\r\n")
    if "\t" in line:
        return [field.strip(" ") for field in line.split("\t")]
    return [field for field in line.split(" ") if field.strip()]


def _unknown_tags(rows: Sequence[_TaggedWords]) -> list[str]:
    """Return an error for each tag that is in no scheme, with its first place.

    A file may have labels without any prefix, but none that resemble another spelling of one.
    """
    places: dict[str, list[str]] = {}
    for row in rows:
        for tag, place in zip(row.tags, row.places, strict=True):
            places.setdefault(tag, []).append(place)
    has_prefixes = any(tag != OUTSIDE and _IS_TAG(tag) for tag in places)
    return [
        f"{its_places[0]}: the tag {tag!r} is in none of the schemes BIO, IO, BIOES, BILOU and "
        f"BMES ({len(its_places):,} words have it). Write O, and B-LABEL or I-LABEL"
        for tag, its_places in places.items()
        if not _IS_TAG(tag) and (has_prefixes or _IS_RESEMBLING(tag))
    ]


def _of_record(record: Row) -> _TaggedWords | _Spans:
    """Return the text of a row."""
    values = record.values
    tokens, tags = find_column(values, ("tokens",)), find_column(values, _TAGS)
    text, entities = find_column(values, ("text",)), find_column(values, ("entities",))
    if text is not None and entities is not None:
        content = values[text]
        if not isinstance(content, str):
            raise ValueError(f"{text} is {content!r:.50}, not a text")
        spans = [_entity(each, content) for each in values[entities] or ()]
        num_repaired = sum(is_repaired for _, is_repaired in spans)
        return _Spans(content, [entity for entity, _ in spans], num_repaired, record.location)
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
        [f"{record.location}, word {number}" for number in range(1, len(words) + 1)],
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


def _entity(value: Any, text: str) -> tuple[Entity, bool]:
    """Return an entity without white space around it, and whether its offsets were repaired."""
    known = value if isinstance(value, Mapping) else {}
    start, end, label = (known.get(name) for name in ("start", "end", "label"))
    if not isinstance(start, int) or not isinstance(end, int) or not isinstance(label, str):
        raise ValueError(f"an entity is {value!r:.80}; it needs start, end and label")
    part = text[start:end] if 0 <= start < end <= len(text) else ""
    own = cell_text(known.get("text"))
    if own is not None and own != part.strip():
        start = locate(own, text, start)
        return Entity(start, start + len(own), label), True
    if not part.strip():
        raise ValueError(f"no text from {start} to {end}, where an entity is; it has {len(text)}")
    if own is None and _are_in_utf_16(start, end, text):
        raise ValueError(
            f"an entity from {start} to {end} divides words, but none if these are offsets in "
            'UTF-16. Count code points, as Python does, or give each entity its "text"'
        )
    left, right = len(part) - len(part.lstrip()), len(part) - len(part.rstrip())
    return Entity(start + left, end - right, label), False


def _are_in_utf_16(start: int, end: int, text: str) -> bool:
    """Whether offsets divide words of a text, but other words or none if they are in UTF-16."""

    def divides(place: int) -> bool:
        return text[place - 1 : place].isalnum() and text[place : place + 1].isalnum()

    places = from_utf_16(start, text), from_utf_16(end, text)
    return (divides(start) or divides(end)) and not any(map(divides, places))


def _of_words(row: _TaggedWords) -> TaggedText:
    starts = list(accumulate((len(word) + 1 for word in row.words), initial=0))
    return TaggedText(
        text=" ".join(row.words),
        words=tuple((at, at + len(word)) for at, word in zip(starts, row.words, strict=False)),
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


def token_task(tokenizer: AlbertTokenizer, length: int) -> TokenClassification:
    """Return the service's task, which lays texts in windows of at most `length` tokens."""
    return TokenClassification(TaskSetup(tokenizer=tokenizer, max_positions=length, hidden_size=1))


def words_of(laid: WindowedText, text: TaggedText) -> list[range]:
    """Return the tokens of each word: the file's, or those that the service finds in plain text.

    A word of a file may have no token.
    """
    if not text.words:
        return laid.words
    begins = [start for start, _ in laid.encoding.offsets]
    return [range(*(bisect_left(begins, place) for place in word)) for word in text.words]


def word_tags(laid: WindowedText, text: TaggedText) -> tuple[list[str], int]:
    """Return the tag of each word, as BIO has it, and the number of entities that fit no words.

    Such an entity begins or ends within a word; the words that begin in it are its.
    """
    offsets = laid.encoding.offsets
    bounds = text.words or [(offsets[word[0]][0], offsets[word[-1]][1]) for word in laid.words]
    tags = [OUTSIDE] * len(bounds)
    num_unfit = 0
    for start, end, label in text.entities:
        inside = [n for n, (begin, _) in enumerate(bounds) if start <= begin < end]
        for number in inside:
            tags[number] = f"{'B' if number == inside[0] else 'I'}-{label}"
        fits = inside and bounds[inside[0]][0] == start and bounds[inside[-1]][1] == end
        num_unfit += not fits
    return tags, num_unfit


def token_examples(
    texts: Sequence[TaggedText], tokenizer: AlbertTokenizer, names: Sequence[str], *, length: int
) -> list[TokenisedExample]:
    """Return the windows of texts, and print the places of entities that fit no words.

    The target of a word's first token is the number of its tag, of each word in one window: that
    with most text around it. The other tokens are IGNORED.
    """
    task, number_of = token_task(tokenizer, length), {name: n for n, name in enumerate(names)}
    examples, unfit = [], []
    for text in progress(texts, title="tokenising texts", unit="texts"):
        if not tokenizer.encode_plain(text.text).ids:
            continue
        laid = task.split(text.text)
        tags, num_unfit = word_tags(laid, text)
        unfit += [text.place] * num_unfit
        targets = [IGNORED] * len(laid.encoding)
        for word, tag in zip(words_of(laid, text), tags, strict=True):
            if word:
                targets[word.start] = number_of[tag]
        owners = laid.windows.window_per_token().tolist()
        for number, (window, (start, end)) in enumerate(
            zip(laid.inputs, laid.windows.ranges, strict=True)
        ):
            part = [
                target if owner == number else IGNORED
                for target, owner in zip(targets[start:end], owners[start:end], strict=True)
            ]
            if any(target != IGNORED for target in part):
                target = [IGNORED, *part, IGNORED]
                examples.append(TokenisedExample(ids=window.ids, types=window.types, target=target))
    _tell("entities that fit no words, and get the words that begin in them", unfit)
    return examples
