"""Progress of long work on stderr: tqdm's bar in a terminal or notebook, else a line now and then.

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

# Seconds between the lines of a log; shorter work writes none.
LINE_EVERY_S: Final = 30.0
# Seconds after which a step of longer work shows a bar.
_BAR_AFTER_S: Final = 3.0

_IS_QUIET: Final[ContextVar[bool]] = ContextVar("is_quiet", default=False)

_ItemT = TypeVar("_ItemT")


def progress(
    items: Iterable[_ItemT], *, title: str, unit: str = "items", is_step: bool = True
) -> Iterator[_ItemT]:
    """Yield the items, and show the number of those that are done."""
    total = len(items) if isinstance(items, Sized) else None
    with progress_bar(title=title, total=total, unit=unit, is_step=is_step) as bar:
        for item in items:
            yield item
            bar.update()


@contextlib.contextmanager
def no_progress() -> Iterator[None]:
    """Show no progress in this thread; for `with`."""
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
    """Return a bar to update by hand; for `with`.

    Args:
        total: the number of units; None if it is not known.
        initial: the units that were done before.
        unit: the name of several units.
        unit_scale: whether large numbers are written as 1.5M.
        is_step: whether the work is one step of several: its bar appears late and disappears.
        bar_format: tqdm's.
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
        miniters=None if is_live else 0,  # a total may be 1, of fractions
    )


class _LogLines:
    """Writes complete lines to stderr. A reader who has gone does not end the work."""

    def write(self, text: str) -> None:
        """Write what the bar would show, as a line."""
        if line := text.strip():
            with contextlib.suppress(OSError):
                sys.stderr.write(f"{line}\n")

    def flush(self) -> None:
        """Flush stderr."""
        with contextlib.suppress(OSError):
            sys.stderr.flush()
