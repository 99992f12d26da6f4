"""Texts for training and evaluating embeddings: pairs, triplets, or pairs with a score."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from albert_serve.errors import InvalidInputError
from albert_serve.tables.columns import SCORES, SIMILAR, find_column, find_name
from training.data.corpus import CorpusError
from training.data.labelled.cells import cell_text, finite_number
from training.data.labelled.rows import collecting, gather_rows, raise_listed, read_records
from training.glue.tasks import TASKS

# The texts of a pair match. A triplet has a third text, which does not match the first. A scored
# pair has a score for the similarity of its texts.
TextKind: TypeAlias = Literal["pairs", "triplets", "scored pairs"]
# The columns of the STS benchmark. Some of its rows lack the last two columns, the texts' sources.
_STSB: Final = TASKS["stsb"].columns.headerless


@dataclass(frozen=True, kw_only=True, slots=True)
class SimilarTexts:
    """The texts of an example.

    Attributes:
        texts: two or three texts, the anchor first.
        score: similarity of two texts, on any scale, or None for pairs and triplets.
        location: file and line, for messages.
    """

    texts: tuple[str, ...]
    score: float | None
    location: str

    @property
    def kind(self) -> TextKind:
        """The kind of the texts."""
        if self.score is not None:
            return "scored pairs"
        return "pairs" if len(self.texts) == 2 else "triplets"


class _Columns(NamedTuple):
    texts: tuple[str, ...]
    score: str | None


def read_similar(
    files: Sequence[Path], columns: Sequence[str] = (), delimiter: str | None = None
) -> list[SimilarTexts]:
    """Read the texts of CSV, TSV, JSONL or Parquet files.

    By default, the columns are (`anchor`, `positive`, `negative`), (`sentence1`, `sentence2`,
    `score`) or (`query`, `answer`), in any case. If the first row of a CSV or TSV file has no such
    name, the file has no header. The columns are then two texts and an optional score or third
    text, or the columns of the STS benchmark.

    Args:
        columns: names of two or three text columns, or of two text columns and the score column. If
            empty, the default names are used.
        delimiter: delimiter of CSV and TSV files, or None to detect it.
    """
    if len(columns) not in (0, 2, 3):
        raise CorpusError(
            f"--embedding-columns {' '.join(columns)} has {len(columns)} names. Specify two "
            "or three text columns, or two text columns and a score column."
        )
    errors: list[str] = []
    texts = gather_rows(
        files, lambda file: _read(file, columns, delimiter, errors), "texts", errors
    )
    kinds = {text.kind: text.location for text in reversed(texts)}
    if len(kinds) > 1:
        found = ", ".join(f"{location} has {kind}" for kind, location in kinds.items())
        errors.append(f"The files have several kinds of texts: {found}. Use one kind.")
    raise_listed(errors)
    return texts


def _read(
    file: Path, columns: Sequence[str], delimiter: str | None, errors: list[str]
) -> Iterator[SimilarTexts]:
    for row in read_records(file, errors, delimiter, None if columns else _columns_by_order):
        try:
            names = _columns_of(row.values, columns)
        except InvalidInputError as error:  # raised if column names differ only in case
            errors.append(f"{row.header}: {error}")
            return
        if names is None:
            missing = f"column {' or '.join(columns)}" if columns else "default columns of texts"
            errors.append(
                f"{row.header}: The file has no {missing}. Its columns are "
                f"{', '.join(map(str, row.values))}. Specify the columns of the texts and of the "
                "score with --embedding-columns."
            )
            return
        with collecting(errors):
            yield _texts_of(row.values, names, row.location)


def _columns_by_order(first: Sequence[str]) -> Sequence[str]:
    """Return the names of a file's columns from its first row, or () if that row is a header."""
    names = {cell.strip().casefold() for cell in first}
    if not names.isdisjoint((*SCORES, *chain.from_iterable(SIMILAR))):
        return ()
    if len(first) >= len(_STSB) - 2:
        return _STSB
    if len(first) == 3 and finite_number(first[2]) is None:
        return "anchor", "positive", "negative"
    return ("sentence1", "sentence2", "score")[: len(first)] if len(first) in (2, 3) else ()


def _columns_of(values: Mapping[str, Any], requested: Sequence[str]) -> _Columns | None:
    has_score = len(requested) == 3 and requested[-1].lower() in ("label", *SCORES)
    scores = requested[2:] if has_score else () if requested else SCORES
    for names in (requested[:2] if has_score else requested,) if requested else SIMILAR:
        texts = tuple(filter(None, (find_name(values, name) for name in names)))
        if len(texts) == len(names):
            score = find_column(values, scores) if len(names) == 2 else None
            return None if has_score and score is None else _Columns(texts, score)
    return None


def _texts_of(values: Mapping[str, Any], names: _Columns, location: str) -> SimilarTexts:
    texts = tuple(cell_text(values[name]) or "" for name in names.texts)
    if not all(texts):
        raise CorpusError(f"{location}: Column {names.texts[texts.index('')]} has no text.")
    if names.score is None:
        return SimilarTexts(texts=texts, score=None, location=location)
    cell = values[names.score]
    if (score := finite_number(cell)) is None:
        raise CorpusError(f"{location}: {cell!r} in column {names.score} is not a number.")
    return SimilarTexts(texts=texts, score=score, location=location)
