"""Sequence packing: the assignment of examples to rows, and of rows to steps.

An example that fills a row is alone in it; the others are packed by best fit, so that rows of a
fixed length have almost no padding. Steps have a constant number of rows, also across windows of
the corpus and epochs. A step depends on the seed and its position alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from albert_serve.config import AlbertConfig
from training.data.examples import Example, Examples, ExampleSettings, build_examples
from training.data.shards import Shards
from training.errors import TrainingError

# Maximum number of sequences in a row, so that the cu_seqlens of a batch have a fixed size.
MAX_IN_ROW: Final = 16
# Tokens of a shuffle window: all of a small corpus.
_WINDOW_TOKENS: Final = 1 << 26
# Number of examples that are packed at a time.
_POOL: Final = 4096
# Rows of examples have a multiple of this length.
_ROW_MULTIPLE: Final = 64
# Seeds of an epoch's random streams, apart from its examples' and masks'.
_PARTS, _ROWS = 2, 3


class Position(NamedTuple):
    """Position in the endless stream of rows: the next row of a window of an epoch."""

    epoch: int = 0
    window: int = 0
    row: int = 0


@dataclass(frozen=True, slots=True)
class _Window:
    """Shuffle window: examples of some parts of the corpus, packed into rows in random order.

    Attributes:
        epoch: of the examples.
        parts: numbers of the parts, and the examples of each.
        order: (N,) indices of examples, counted through all parts, row by row.
        row_bounds: (rows + 1,) bounds of the rows in `order`.
    """

    epoch: int
    parts: tuple[tuple[int, Examples], ...]
    order: NDArray[np.int64]
    row_bounds: NDArray[np.int64]

    @property
    def num_rows(self) -> int:
        """Rows in the window."""
        return len(self.row_bounds) - 1

    def row(self, number: int) -> list[Example]:
        """Return the examples of a row."""
        within = slice(*self.row_bounds[number : number + 2])
        return [self._example(index) for index in self.order[within].tolist()]

    def _example(self, index: int) -> Example:
        for part, examples in self.parts:
            if index < len(examples):
                bounds = tuple(examples.bounds[index].tolist())
                return Example(part, self.epoch, index, bounds, int(examples.labels[index]))
            index -= len(examples)
        raise IndexError(index)


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """The rows of one step, and the position of the next step."""

    rows: list[list[Example]]
    next: Position


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All steps of a run over a corpus."""

    shards: Shards
    settings: ExampleSettings
    seed: int

    def steps(self, num_rows: int, start: Position) -> Iterator[PlannedStep]:
        """Yield steps of `num_rows` rows without end, from a position."""
        rows: list[list[Example]] = []
        num_empty = 0
        for at, window in self._windows(start):
            num_empty = 0 if window.num_rows else num_empty + 1
            if num_empty > len(self.shards.parts):
                raise TrainingError(
                    "no document of the corpus has sentences enough for a pair; give others"
                )
            for number in range(at.row, window.num_rows):
                rows.append(window.row(number))
                if len(rows) == num_rows:
                    yield PlannedStep(rows, at._replace(row=number + 1))
                    rows = []

    def epoch(self, number: int) -> Iterator[list[Example]]:
        """Yield the rows of one epoch."""
        groups = self._groups(number)
        for index, parts in enumerate(groups):
            _, window = self._window((Position(epoch=number, window=index), parts))
            yield from map(window.row, range(window.num_rows))

    def _windows(self, start: Position) -> Iterator[tuple[Position, _Window]]:
        """Yield windows from a position on; the next one is built in the background."""
        places = self._places(start)
        with ThreadPoolExecutor(1, thread_name_prefix="windows") as pool:
            future = pool.submit(self._window, next(places))
            while True:
                at, window = future.result()
                future = pool.submit(self._window, next(places))
                yield at, window

    def _places(self, start: Position) -> Iterator[tuple[Position, tuple[int, ...]]]:
        """Yield the position of each window and its parts of the corpus."""
        at = start
        while True:
            groups = self._groups(at.epoch)
            for window in range(at.window, len(groups)):
                yield at._replace(window=window), groups[window]
                at = at._replace(row=0)
            at = Position(epoch=at.epoch + 1)

    def _groups(self, epoch: int) -> list[tuple[int, ...]]:
        """Shuffle the parts of the corpus for an epoch, and group them into windows."""
        parts = self.shards.parts
        held = np.flatnonzero([part.num_documents for part in parts])
        if not len(held):
            raise TrainingError("the corpus gives no example; give more text")
        rng = np.random.default_rng([_PARTS, self.seed, epoch])
        groups: list[tuple[int, ...]] = []
        room = 0
        for number in rng.permutation(held).tolist():
            size = parts[number].num_tokens
            if size > room or not groups:
                groups.append(())
                room = _WINDOW_TOKENS
            groups[-1] += (number,)
            room -= size
        return groups

    def _window(self, place: tuple[Position, tuple[int, ...]]) -> tuple[Position, _Window]:
        at, numbers = place
        parts = tuple(
            (
                number,
                build_examples(
                    self.shards.parts[number],
                    self.settings,
                    seed=self.seed,
                    epoch=at.epoch,
                    number=number,
                ),
            )
            for number in numbers
        )
        rng = np.random.default_rng([_ROWS, self.seed, at.epoch, at.window])
        return at, _arrange(at.epoch, parts, rng, self.settings.length)


def _arrange(
    epoch: int,
    parts: tuple[tuple[int, Examples], ...],
    rng: np.random.Generator,
    length: int,
) -> _Window:
    """Pack the examples of some parts into rows of `length` tokens, in random order."""
    sizes = np.concatenate([examples.sizes for _, examples in parts])
    shuffled = rng.permutation(len(sizes))
    row_of = pack(sizes[shuffled], length)
    num_rows = int(row_of.max(initial=-1)) + 1
    place = rng.permutation(num_rows)[row_of]
    order = np.argsort(place, kind="stable")
    bounds = np.searchsorted(place[order], np.arange(num_rows + 1))
    return _Window(epoch, parts, shuffled[order], bounds)


def pack(sizes: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """Assign each example (N,) a row (N,), with at most `length` tokens a row.

    Best fit decreasing over some thousand examples at a time: an example goes into the row where
    it leaves the least room.
    """
    row_of = np.zeros(len(sizes), np.int64)
    fills_a_row = sizes == length
    num_rows = int(fills_a_row.sum())
    row_of[fills_a_row] = np.arange(num_rows)
    rest = np.flatnonzero(~fills_a_row)
    for begin in range(0, len(rest), _POOL):
        pool = rest[begin : begin + _POOL]
        pool = pool[np.argsort(-sizes[pool], kind="stable")]
        rows = _best_fit(sizes[pool].tolist(), length)
        row_of[pool] = num_rows + np.array(rows)
        num_rows += max(rows) + 1
    return row_of


def best_row_length(
    batches: Sequence[NDArray[np.int64]], *, longest: int, config: AlbertConfig
) -> int:
    """Return the row length for which the packed batches cost the fewest operations.

    Longer rows have less padding, and attention over more pairs of positions.
    """
    most = config.max_positions
    least = shortest_row_length(longest, most=most, multiple=_ROW_MULTIPLE)

    def cost(length: int) -> float:
        # A layer's products take 24 H^2 operations a token (F = 4 H), attention 4 H a pair.
        num_rows = sum(int(pack(sizes, length).max()) + 1 for sizes in batches)
        return num_rows * length * (1 + length / (6 * config.hidden_size))

    return min(range(least, most + 1, _ROW_MULTIPLE), key=cost)


def shortest_row_length(longest: int, *, most: int, multiple: int) -> int:
    """Return the length of the shortest rows for examples of up to `longest` tokens.

    It is a multiple of `multiple`, or `most`.
    """
    return min(-(-longest // multiple) * multiple, most)


def _best_fit(sizes: list[int], length: int) -> list[int]:
    """Return the row of each example; sizes must be in descending order."""
    rows: list[int] = []
    # Open rows by the room left, and a bit mask of these rooms: the lowest bit from `size` on is
    # the best fit.
    open_rows: dict[int, list[tuple[int, int]]] = {}
    rooms = num_rows = 0
    for size in sizes:
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            row, num_in_row = open_rows[room].pop()
            if not open_rows[room]:
                rooms ^= 1 << room
        else:
            room, row, num_in_row = length, num_rows, 0
            num_rows += 1
        rows.append(row)
        left, num_in_row = room - size, num_in_row + 1
        if left and num_in_row < MAX_IN_ROW - 1:  # padding counts as a sequence
            open_rows.setdefault(left, []).append((row, num_in_row))
            rooms |= 1 << left
    return rows
