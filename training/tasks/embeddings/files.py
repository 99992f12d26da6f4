"""Texts whose vectors are to be learnt: pairs, triplets, or pairs with a score."""

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

# The texts of an example; pairs are of texts that belong together, triplets have a third that
# does not, and scored pairs are as alike as their score says.
TextKind: TypeAlias = Literal["pairs", "triplets", "scored pairs"]
# The official files of the STS benchmark, of which some rows end with the two sources.
_STSB: Final = TASKS["stsb"].columns.headerless


@dataclass(frozen=True, kw_only=True, slots=True)
class SimilarTexts:
    """Texts of which the first is the anchor.

    Attributes:
        texts: 2 or 3.
        score: of two texts, on any scale; None without one.
        place: file and line, for messages.
    """

    texts: tuple[str, ...]
    score: float | None
    place: str

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

    Columns have the names that sentence-transformers uses: `anchor`, `positive` and `negative`;
    `sentence1`, `sentence2` and `score`; or `query` and `answer`; in any case. A CSV or TSV file
    whose first row has none of these has no header: its columns are two texts and perhaps a score
    or a third text, or those of the STS benchmark.

    Args:
        columns: two or three columns of texts in the order of the list, and then perhaps that of
            the score; the usual ones by default.
        delimiter: of CSV and TSV files; None to detect it.
    """
    if len(columns) not in (0, 2, 3):
        raise CorpusError(
            f"--embedding-columns {' '.join(columns)}: give two or three columns of texts, or two "
            "and that of the score"
        )
    errors: list[str] = []
    texts = gather_rows(
        files, lambda file: _read(file, columns, delimiter, errors), "texts", errors
    )
    kinds = {text.kind: text.place for text in reversed(texts)}
    if len(kinds) > 1:
        places = "; ".join(f"{place} has {kind}" for kind, place in kinds.items())
        errors.append(f"all files need the same kind of texts: {places}")
    raise_listed(errors)
    return texts


def _read(
    file: Path, columns: Sequence[str], delimiter: str | None, errors: list[str]
) -> Iterator[SimilarTexts]:
    for row in read_records(file, errors, delimiter, None if columns else _columns_by_order):
        try:
            names = _columns_of(row.values, columns)
        except InvalidInputError as error:  # columns that differ only in case
            errors.append(f"{row.header}: {error}")
            return
        if names is None:
            asked = f"no column {' or '.join(columns)}" if columns else "no usual columns of texts"
            errors.append(
                f"{row.header}: {asked}; its columns are {', '.join(map(str, row.values))} "
                "(--embedding-columns names those of the texts, and of the score)"
            )
            return
        with collecting(errors):
            yield _texts_of(row.values, names, row.location)


def _columns_by_order(first: Sequence[str]) -> Sequence[str]:
    """Return the columns of a file without a header by its first row; none if that is a header."""
    if any(find_name(first, name) for name in (*SCORES, *chain.from_iterable(SIMILAR))):
        return ()
    if len(first) >= len(_STSB) - 2:
        return _STSB
    if len(first) == 3 and finite_number(first[2]) is None:
        return "anchor", "positive", "negative"
    return ("sentence1", "sentence2", "score")[: len(first)] if len(first) in (2, 3) else ()


def _columns_of(values: Mapping[str, Any], asked: Sequence[str]) -> _Columns | None:
    has_score = len(asked) == 3 and asked[-1].lower() in ("label", *SCORES)
    scores = asked[2:] if has_score else () if asked else SCORES
    for usual in (asked[:2] if has_score else asked,) if asked else SIMILAR:
        texts = tuple(filter(None, (find_name(values, name) for name in usual)))
        if len(texts) == len(usual):
            score = find_column(values, scores) if len(usual) == 2 else None
            return None if has_score and score is None else _Columns(texts, score)
    return None


def _texts_of(values: Mapping[str, Any], names: _Columns, place: str) -> SimilarTexts:
    texts = tuple(cell_text(values[name]) or "" for name in names.texts)
    if not all(texts):
        raise CorpusError(f"{place}: no text in column {names.texts[texts.index('')]}")
    if names.score is None:
        return SimilarTexts(texts=texts, score=None, place=place)
    cell = values[names.score]
    if (score := finite_number(cell)) is None:
        raise CorpusError(f"{place}: {cell!r} in column {names.score} is no number")
    return SimilarTexts(texts=texts, score=score, place=place)
