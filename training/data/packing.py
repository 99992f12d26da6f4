"""Sequence packing: the assignment of examples to rows, and of rows to steps.

An example that fills a row is alone in it. Shorter examples are packed by best fit, so rows of a
fixed length have almost no padding. All steps have the same number of rows, even if they extend
over several windows or epochs. A step depends only on the seed and its position.
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
# Maximum number of tokens in a shuffle window, which may contain all of a small corpus.
_WINDOW_TOKENS: Final = 1 << 26
# Number of examples that are packed together.
_POOL: Final = 4096
# Row lengths for labelled examples are multiples of this number.
_ROW_MULTIPLE: Final = 64
# Numbers for the seeds of an epoch's random generators. training/data/examples.py uses 0 and 1.
_PARTS, _ROWS = 2, 3


class Position(NamedTuple):
    """Position in the endless stream of rows: epoch, window, and the next row in the window."""

    epoch: int = 0
    window: int = 0
    row: int = 0


@dataclass(frozen=True, slots=True)
class _Window:
    """A shuffle window: examples from some parts of the corpus, in rows in random order.

    Attributes:
        epoch: number of the epoch.
        parts: number and examples of each part.
        order: (N,) indices of examples, row by row, with the examples of all parts concatenated.
        row_bounds: (rows + 1,) bounds of the rows in `order`.
    """

    epoch: int
    parts: tuple[tuple[int, Examples], ...]
    order: NDArray[np.int64]
    row_bounds: NDArray[np.int64]

    @property
    def num_rows(self) -> int:
        """Number of rows in the window."""
        return len(self.row_bounds) - 1

    def row(self, number: int) -> list[Example]:
        """Return the examples of a row."""
        begin, end = self.row_bounds[number : number + 2]
        return [self._example(index) for index in self.order[begin:end].tolist()]

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
        """Yield steps of `num_rows` rows endlessly, from a position."""
        rows: list[list[Example]] = []
        num_empty = 0
        for position, window in self._windows(start):
            num_empty = 0 if window.num_rows else num_empty + 1
            if num_empty > len(self.shards.parts):
                raise TrainingError(
                    "No document has enough sentences for a pair. Add longer documents."
                )
            for number in range(position.row, window.num_rows):
                rows.append(window.row(number))
                if len(rows) == num_rows:
                    yield PlannedStep(rows, position._replace(row=number + 1))
                    rows = []

    def epoch(self, number: int) -> Iterator[list[Example]]:
        """Yield the rows of one epoch."""
        groups = self._groups(number)
        for index, parts in enumerate(groups):
            _, window = self._window(Position(epoch=number, window=index), parts)
            yield from map(window.row, range(window.num_rows))

    def _windows(self, start: Position) -> Iterator[tuple[Position, _Window]]:
        """Yield each window and its position, and build the next window in the background."""
        positions = self._window_positions(start)
        with ThreadPoolExecutor(1, thread_name_prefix="windows") as pool:
            future = pool.submit(self._window, *next(positions))
            while True:
                position, window = future.result()
                future = pool.submit(self._window, *next(positions))
                yield position, window

    def _window_positions(self, start: Position) -> Iterator[tuple[Position, tuple[int, ...]]]:
        """Yield the position of each window and its parts of the corpus."""
        position = start
        while True:
            groups = self._groups(position.epoch)
            for window in range(position.window, len(groups)):
                yield position._replace(window=window), groups[window]
                position = position._replace(row=0)
            position = Position(epoch=position.epoch + 1)

    def _groups(self, epoch: int) -> list[tuple[int, ...]]:
        """Shuffle the parts of the corpus for an epoch, and group them into windows."""
        parts = self.shards.parts
        rng = np.random.default_rng([_PARTS, self.seed, epoch])
        groups: list[tuple[int, ...]] = []
        room = 0
        for number in rng.permutation(len(parts)).tolist():
            size = parts[number].num_tokens
            if size > room or not groups:
                groups.append(())
                room = _WINDOW_TOKENS
            groups[-1] += (number,)
            room -= size
        return groups

    def _window(self, position: Position, numbers: tuple[int, ...]) -> tuple[Position, _Window]:
        parts = tuple(
            (
                number,
                build_examples(
                    self.shards.parts[number],
                    self.settings,
                    seed=self.seed,
                    epoch=position.epoch,
                    number=number,
                ),
            )
            for number in numbers
        )
        rng = np.random.default_rng([_ROWS, self.seed, position.epoch, position.window])
        return position, _arrange(position.epoch, parts, rng, self.settings.length)


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
    new_row_of = rng.permutation(num_rows)[row_of]
    order = np.argsort(new_row_of, kind="stable")
    bounds = np.searchsorted(new_row_of[order], np.arange(num_rows + 1))
    return _Window(epoch, parts, shuffled[order], bounds)


def pack(sizes: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """Return the row number of each example (N,), with at most `length` tokens per row.

    The method is best fit decreasing: starting with the longest, each example goes into the row
    that it leaves with the least room. Pools of a few thousand examples are packed separately.

    Args:
        sizes: (N,) number of tokens in each example.
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

    Longer rows have less padding, but more pairs of positions in attention.

    Args:
        batches: number of tokens in each example (N,), for each batch.
        longest: number of tokens in the longest example.
    """
    maximum = config.max_positions
    minimum = shortest_row_length(longest, maximum=maximum, multiple=_ROW_MULTIPLE)

    def cost(length: int) -> float:
        # A layer's products take 24 H^2 operations per token (F = 4 H), attention 4 H per pair.
        num_rows = sum(int(pack(sizes, length).max()) + 1 for sizes in batches)
        return num_rows * length * (1 + length / (6 * config.hidden_size))

    return min(range(minimum, maximum + 1, _ROW_MULTIPLE), key=cost)


def shortest_row_length(longest: int, *, maximum: int, multiple: int) -> int:
    """Return the minimum row length for examples of up to `longest` tokens.

    The length is a multiple of `multiple`, or `maximum` if `maximum` is less.
    """
    return min(-(-longest // multiple) * multiple, maximum)


def _best_fit(sizes: list[int], length: int) -> list[int]:
    """Return the row number of each example. The sizes must be in descending order."""
    rows: list[int] = []
    # `open_rows` groups the open rows by their number of free positions. `rooms` is a bit mask of
    # these numbers, so its lowest bit at or above `size` is the best fit.
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
