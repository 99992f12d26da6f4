"""Contents of table cells: texts, the labels of a row, and label names."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final

from albert_serve.bundle.manifest import ProblemType
from training.data.labelled.columns import Columns

# Matches an integer that is written with decimal places, such as 1.0.
_INTEGER: Final = re.compile(r"(-?\d+)\.0*").fullmatch
_INDICATORS: Final = {"1": True, "0": False, "true": True, "false": False}


class LabelFormatError(ValueError):
    """A column whose labels are not in the expected format."""


def cell_text(value: Any) -> str | None:
    """Return a cell as text without surrounding spaces, or None if it is empty or nested."""
    if not isinstance(value, str | int | float | Decimal | bytes) or _is_missing(value):
        return None
    if isinstance(value, bytes):
        value = value.decode()
    elif isinstance(value, float) and value.is_integer():
        value = int(value)  # Integers are read as floats if the column has empty cells.
    elif isinstance(value, Decimal):
        value = f"{value:f}"
    return str(value).strip() or None


def finite_number(value: Any) -> float | None:
    """Return the number in a cell, or None if it is not a finite number."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def locate(part: str, text: str, start: int) -> int:
    """Return the offset of a part of a text, correcting the offset `start` of a file if necessary.

    If the part is not at `start`, its offset is the first of these that exists: the part's only
    occurrence in the text, `start` as an offset in UTF-16, the only occurrence that overlaps
    `start`.

    Raises:
        ValueError: none of these offsets exists.
    """
    if start >= 0 and text.startswith(part, start):
        return start
    offsets = [match.start() for match in re.finditer(f"(?={re.escape(part)})", text)]
    if len(offsets) != 1:
        near = [offset for offset in offsets if 0 < offset == from_utf_16(start, text)] or [
            offset for offset in offsets if abs(offset - start) < len(part)
        ]
        if len(near) != 1:
            actual = text[start : start + len(part)] if start >= 0 else ""
            raise ValueError(
                f"The text has {actual!r} at character {start}, not {part!r}, which occurs "
                f"{len(offsets)} times. Correct the offset, or omit this part."
            )
        offsets = near
    return offsets[0]


def from_utf_16(offset: int, text: str) -> int:
    """Convert an offset in UTF-16 code units to an offset in code points."""
    beginning = text.encode("utf-16-le", "surrogatepass")[: 2 * max(offset, 0)]
    return len(beginning.decode("utf-16-le", "ignore"))


def plain_number(label: str) -> str:
    """Return a label without the decimal places of an integer: 1.0 becomes 1."""
    integer = _INTEGER(label)
    return integer[1] if integer else label


def _is_missing(value: Any) -> bool:
    """Return whether a cell has no value. An empty text is a value."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def is_blank(value: Any) -> bool:
    """Return whether a cell is empty or contains only spaces."""
    return _is_missing(value) or (isinstance(value, str) and not value.strip())


def labels_in(
    values: Mapping[str, Any], names: Sequence[str], columns: Columns, problem: ProblemType
) -> tuple[str, ...] | None:
    """Return the labels of a row, with 1.0 as 1, or None if a cell is empty.

    Args:
        values: cells of the row, by column.
        names: column of the labels, or one column of 0 and 1 for each label.

    Raises:
        LabelFormatError: a cell contains a list instead of a text, or a text instead of a list.
        ValueError: a cell is neither 0 nor 1, or contains bytes that are not UTF-8.
    """
    cells = [values[name] for name in names]
    if columns.indicators:
        indicators = [cell_text(cell) for cell in cells]
        for name, indicator in zip(names, indicators, strict=True):
            if indicator is not None and indicator.lower() not in _INDICATORS:
                raise ValueError(f"column {name} contains {indicator!r}, not 0 or 1.")
        if None in indicators:
            return None
        return tuple(
            name
            for name, indicator in zip(names, indicators, strict=True)
            if _INDICATORS[str(indicator).lower()]
        )
    (cell,), (name,) = cells, names
    if problem == "multi_label_classification":
        if _is_missing(cell):
            return None
        if not isinstance(cell, list) and columns.separator is None:
            raise LabelFormatError(
                f"column {name} does not contain lists. Set --label-separator to split its texts."
            )
        if not isinstance(cell, list):
            texts = (label.strip() for label in str(cell).split(columns.separator))
            return tuple(dict.fromkeys(filter(None, texts)))
        cells = cell
    elif isinstance(cell, list):
        raise LabelFormatError(
            f"column {name} contains lists. If texts have several labels, set --problem-type "
            "multi_label_classification."
        )
    if any(isinstance(label, list | dict) for label in cells):
        raise LabelFormatError(
            f"column {name} contains nested values. Choose a column with one label in each row."
        )
    labels = list(map(cell_text, cells))
    return None if None in labels else tuple(dict.fromkeys(map(plain_number, filter(None, labels))))


def label_key(name: str) -> str:
    """Return a key that all spellings of a label share: without case and outer spaces, 1.0 as 1."""
    return plain_number(name.strip()).casefold()


def first_spellings(names: Iterable[str]) -> list[str]:
    """Return each label once, in its first spelling, without outer spaces."""
    spellings: dict[str, str] = {}
    for name in names:
        spellings.setdefault(label_key(name), name.strip())
    return list(spellings.values())


def label_indices(names: Sequence[str], labels: Iterable[str]) -> dict[str, int]:
    """Map each label to the index of its name, and omit labels without a name.

    Names that differ only in case, as in older checkpoints, match only labels in the same case.
    """
    exact = {name: index for index, name in enumerate(names)}
    keys = list(map(label_key, names))
    counts = Counter(keys)
    by_key = {key: index for index, key in enumerate(keys) if counts[key] == 1}
    indices = {label: exact.get(label, by_key.get(label_key(label))) for label in labels}
    return {label: index for label, index in indices.items() if index is not None}
