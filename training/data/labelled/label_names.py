"""Names of labels, which count without their case and outer spaces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from training.data.labelled.cells import plain_number


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
