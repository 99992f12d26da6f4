"""Progress of long work on stderr: a bar in a terminal or notebook, else a line every so often.

    for item in progress(items, title="reading"):
        ...
    with progress_bar(title="tokenising", total=num_bytes, unit="B", unit_scale=True) as bar:
        bar.update(...)

Work that ends within `LINE_EVERY_S` writes no line.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterable, Iterator, Sized
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tqdm import TqdmWarning, tqdm

LINE_EVERY_S: Final = 30.0
# Shorter work shows no bar either, where it is one of several steps.
_BAR_AFTER_S: Final = 3.0
_LINE: Final = (
    "{desc}: {percentage:.0f}%, {n_fmt} of {total_fmt} {unit} in {elapsed}, "
    "{remaining} left{postfix}"
)
_LINE_OF_UNKNOWN: Final = "{desc}: {n_fmt} {unit} in {elapsed}{postfix}"

_IS_QUIET: Final[ContextVar[bool]] = ContextVar("is_quiet", default=False)

_ItemT = TypeVar("_ItemT")
if TYPE_CHECKING:
    _Bar = tqdm[Any]
else:
    _Bar = tqdm


def progress(
    items: Iterable[_ItemT], *, title: str, unit: str = "items", is_step: bool = True
) -> Iterator[_ItemT]:
    """Yield the items, and show how many of them are done.

    Args:
        unit: the name of several items.
        is_step: whether the work is one step of several: its bar comes late and goes.
    """
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


def is_quiet() -> bool:
    """Whether this thread is within `no_progress`."""
    return _IS_QUIET.get()


def progress_bar(
    *,
    title: str,
    total: float | None = None,
    initial: float = 0,
    unit: str = "items",
    unit_scale: bool = False,
    is_step: bool = False,
    is_hidden: bool = False,
    bar_format: str | None = None,
    line_format: str | None = None,
) -> tqdm[Any]:
    """Return a bar to update by hand; for `with`.

    Args:
        total: the number of units; None where it is not known.
        initial: the units that were done before.
        unit: the name of several units.
        unit_scale: whether large numbers are written as 1.5M.
        is_step: whether the work is one step of several: its bar comes late and goes.
        is_hidden: whether nothing is shown.
        bar_format: tqdm's, in a terminal or notebook.
        line_format: tqdm's, elsewhere.
    """
    options: dict[str, Any] = {
        "desc": title,
        "total": total,
        "initial": initial,
        "unit_scale": unit_scale,
        "disable": is_hidden or is_quiet(),
        "leave": not is_step,
    }
    if sys.stderr.isatty() or "ipykernel" in sys.modules:
        with warnings.catch_warnings(category=TqdmWarning, action="ignore"):
            from tqdm.auto import tqdm as live_tqdm  # a widget in a notebook with ipywidgets

        delay_s = _BAR_AFTER_S if is_step else 0.0
        return live_tqdm(**options, unit=f" {unit}", delay=delay_s, bar_format=bar_format)
    line = line_format or (_LINE_OF_UNKNOWN if total is None else _LINE)
    return _Lines(
        **options,
        unit=unit,
        bar_format=line,
        delay=LINE_EVERY_S,
        mininterval=LINE_EVERY_S,
        miniters=0,  # the total may be 1, of fractions
    )


class _Lines(_Bar):
    """Writes whole lines, where a terminal would show one line that changes."""

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Write the line."""
        text = str(self) if msg is None else msg
        try:
            if text:
                self.fp.write(text + "\n")
                self.fp.flush()
        except OSError:  # nobody reads any more, which is no reason to end the work
            self.disable = True

    def clear(self, nolock: bool = False) -> None:
        """Leave what is written."""

    @classmethod
    @contextlib.contextmanager
    def external_write_mode(cls, file: Any = None, nolock: bool = False) -> Iterator[None]:
        """Let others write: there is nothing to clear or to draw again."""
        yield

    def close(self) -> None:
        """Write a last line, if there were lines."""
        if self.disable:
            return
        has_lines = self.last_print_t > self.start_t
        if self.leave and has_lines and self.n != self.last_print_n:
            self.display()
        self.last_print_t = 0.0  # so that nothing is cleared
        super().close()
