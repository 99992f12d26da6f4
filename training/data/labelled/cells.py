"""Cells of tables: texts, the labels of a row, and the names of labels."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final

from albert_serve.bundle.manifest import ProblemType
from training.data.labelled.columns import Columns

# A whole number that may be written as a decimal fraction.
_WHOLE: Final = re.compile(r"(-?\d+)\.0*").fullmatch
_IS_MARKED: Final = {"1": True, "0": False, "true": True, "false": False}


class LabelFormError(ValueError):
    """A column whose cells hold labels in another form."""


def cell_text(value: Any) -> str | None:
    """Return a cell as text without surrounding spaces; None if it is empty or nested."""
    if not isinstance(value, str | int | float | Decimal | bytes) or _is_gap(value):
        return None
    if isinstance(value, bytes):
        value = value.decode()
    elif isinstance(value, float) and value.is_integer():  # integers of a column with gaps
        value = int(value)
    elif isinstance(value, Decimal):
        value = f"{value:f}"
    return str(value).strip() or None


def finite_number(value: Any) -> float | None:
    """Return the number in a cell; None if it is none, or not finite."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def locate(part: str, text: str, start: int) -> int:
    """Return where a text has a part whose offset is said to be `start`.

    A part that stands elsewhere is taken from the only place where the text has it, from the place
    of its offset in UTF-16, or from the only one that overlaps the place of its offset.

    Raises:
        ValueError: it is at none of these.
    """
    if start >= 0 and text.startswith(part, start):
        return start
    places = [match.start() for match in re.finditer(f"(?={re.escape(part)})", text)]
    if len(places) != 1:
        near = [place for place in places if 0 < place == from_utf_16(start, text)] or [
            place for place in places if abs(place - start) < len(part)
        ]
        if len(near) != 1:
            there = text[start : start + len(part)] if start >= 0 else ""
            raise ValueError(
                f"the text has {there!r} at character {start}, not {part!r}, which stands at "
                f"{len(places)} places; correct the offset, or leave this out"
            )
        places = near
    return places[0]


def from_utf_16(offset: int, text: str) -> int:
    """Return the offset in code points of one in UTF-16."""
    before = text.encode("utf-16-le", "surrogatepass")[: 2 * max(offset, 0)]
    return len(before.decode("utf-16-le", "ignore"))


def plain_number(label: str) -> str:
    """Return a label, without the decimal places of a whole number: 1.0 is 1."""
    number = _WHOLE(label)
    return number[1] if number else label


def _is_gap(value: Any) -> bool:
    """Whether a cell has no value, not even an empty text."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def is_blank(value: Any) -> bool:
    """Whether a cell has no value, or a text of spaces at most."""
    return _is_gap(value) or (isinstance(value, str) and not value.strip())


def labels_in(
    values: Mapping[str, Any], names: Sequence[str], columns: Columns, problem: ProblemType
) -> tuple[str, ...] | None:
    """Return the labels of a row, one or any number, in which 1.0 is 1; None if a cell is empty.

    Args:
        names: the column of the labels, or the columns of 0 and 1.

    Raises:
        LabelFormError: lists stand where texts are read, or texts where lists are.
        ValueError: a cell is neither 0 nor 1, or holds bytes that are not UTF-8.
    """
    cells = [values[name] for name in names]
    if columns.indicators:
        marks = [cell_text(cell) for cell in cells]
        for name, mark in zip(names, marks, strict=True):
            if mark is not None and mark.lower() not in _IS_MARKED:
                raise ValueError(f"column {name} holds {mark!r}, not 0 or 1")
        if None in marks:
            return None
        return tuple(
            name for name, mark in zip(names, marks, strict=True) if _IS_MARKED[str(mark).lower()]
        )
    (cell,), (name,) = cells, names
    if problem == "multi_label_classification":
        if _is_gap(cell):
            return None
        if not isinstance(cell, list) and columns.separator is None:
            raise LabelFormError(
                f"column {name} holds no lists; --label-separator divides a text into labels"
            )
        if not isinstance(cell, list):
            texts = (label.strip() for label in str(cell).split(columns.separator))
            return tuple(dict.fromkeys(filter(None, texts)))
        cells = cell
    elif isinstance(cell, list):
        raise LabelFormError(
            f"column {name} holds lists; --problem-type multi_label_classification is for texts "
            "with several labels"
        )
    if any(isinstance(label, list | dict) for label in cells):
        raise LabelFormError(
            f"column {name} holds nested values; give a column with one label in each row"
        )
    labels = list(map(cell_text, cells))
    return None if None in labels else tuple(dict.fromkeys(map(plain_number, filter(None, labels))))


def label_key(name: str) -> str:
    """Return a name without case and outer spaces, in which 1.0 is 1."""
    return plain_number(name.strip()).casefold()


def first_spellings(names: Iterable[str]) -> list[str]:
    """Return each label once, in the first of its spellings, without outer spaces."""
    spellings: dict[str, str] = {}
    for name in names:
        spellings.setdefault(label_key(name), name.strip())
    return list(spellings.values())


def label_indices(names: Sequence[str], labels: Iterable[str]) -> dict[str, int]:
    """Return the index of the name of each label; labels without one are left out.

    Names that differ in case alone, as an older checkpoint may have them, need their own case.
    """
    exact = {name: index for index, name in enumerate(names)}
    keys = list(map(label_key, names))
    counts = Counter(keys)
    by_key = {key: index for index, key in enumerate(keys) if counts[key] == 1}
    indices = {label: exact.get(label, by_key.get(label_key(label))) for label in labels}
    return {label: index for label, index in indices.items() if index is not None}
