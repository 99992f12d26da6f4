"""Progress of long work on stderr: tqdm's bar in a terminal or notebook, or lines at intervals.

for item in progress(items, title="reading"):
    ...
with progress_bar(title="tokenising", total=num_bytes, unit="B", unit_scale=True) as bar:
    bar.update(...)
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterable, Iterator, Sized
from contextvars import ContextVar
from typing import Any, Final, TypeVar

from tqdm import TqdmWarning

with warnings.catch_warnings(category=TqdmWarning, action="ignore"):
    from tqdm.auto import tqdm  # a widget in a notebook with ipywidgets

# Seconds between the lines in a log. Shorter work writes no line.
LINE_EVERY_S: Final = 30.0
# Seconds after which a step of longer work shows a bar.
_BAR_AFTER_S: Final = 3.0

_IS_QUIET: Final[ContextVar[bool]] = ContextVar("is_quiet", default=False)

_ItemT = TypeVar("_ItemT")


def progress(
    items: Iterable[_ItemT], *, title: str, unit: str = "items", is_step: bool = True
) -> Iterator[_ItemT]:
    """Yield the items, and show the number of completed items."""
    total = len(items) if isinstance(items, Sized) else None
    with progress_bar(title=title, total=total, unit=unit, is_step=is_step) as bar:
        for item in items:
            yield item
            bar.update()


@contextlib.contextmanager
def no_progress() -> Iterator[None]:
    """Hide progress in this thread, in a `with` statement."""
    token = _IS_QUIET.set(True)
    try:
        yield
    finally:
        _IS_QUIET.reset(token)


def progress_bar(
    *,
    title: str,
    total: float | None = None,
    initial: float = 0,
    unit: str = "items",
    unit_scale: bool = False,
    is_step: bool = False,
    bar_format: str | None = None,
) -> tqdm[Any]:
    """Return a bar to update by hand, in a `with` statement.

    Args:
        title: text before the bar.
        total: number of units, or None if it is unknown.
        initial: number of units that were completed before.
        unit: name of the unit, in the plural.
        unit_scale: whether large numbers are written like 1.5M.
        is_step: whether the work is one of several steps, whose bar appears late and disappears.
        bar_format: format of tqdm's bar.
    """
    is_live = sys.stderr.isatty() or "ipykernel" in sys.modules
    return tqdm(
        desc=title,
        total=total,
        initial=initial,
        unit=f" {unit}",
        unit_scale=unit_scale,
        leave=not is_step,
        bar_format=bar_format,
        disable=_IS_QUIET.get(),
        file=None if is_live else _LogLines(),
        mininterval=0.1 if is_live else LINE_EVERY_S,
        delay=(_BAR_AFTER_S if is_step else 0) if is_live else LINE_EVERY_S,
        miniters=None if is_live else 0,  # so that fractions of a total of 1 are shown
    )


class _LogLines:
    """A writer of complete lines to stderr. A closed stderr does not end the work."""

    def write(self, text: str) -> None:
        """Write the content of the bar as a line."""
        if line := text.strip():
            with contextlib.suppress(OSError):
                sys.stderr.write(f"{line}\n")

    def flush(self) -> None:
        """Flush stderr."""
        with contextlib.suppress(OSError):
            sys.stderr.flush()
