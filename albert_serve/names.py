"""Names of columns, matched without case, and of labels, of which messages show the first."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from albert_serve.errors import InvalidInputError

# Longer lists are cut.
_MAX_LISTED: Final = 10
_NUM_SHOWN: Final = 3


def find_name(names: Collection[str], wanted: str) -> str | None:
    """Return the name that is `wanted`, or else the one that is but for case and outer spaces."""
    if wanted in names:
        return wanted
    alike = [name for name in names if name.strip().casefold() == wanted.casefold()]
    if len(alike) > 1:
        raise InvalidInputError(
            f"the columns {' and '.join(map(repr, alike))} differ only in case; name one of them, "
            "or rename the others"
        )
    return alike[0] if alike else None


def listed(names: Sequence[str]) -> str:
    """Return names for a message; of more than ten the first three, and how many more there are."""
    if len(names) <= _MAX_LISTED:
        return ", ".join(names)
    return f"{', '.join(names[:_NUM_SHOWN])}, ... and {len(names) - _NUM_SHOWN:,} more"
