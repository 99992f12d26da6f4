"""Parts that are computed in parallel, and are those that would be computed one after another.

A part leaves out the rows that an earlier part answers. While that one is being computed, it is not
known whether its answer will be stored for later parts: errors and very long answers are not. So it
is assumed, and checked when all earlier parts are complete. Where the assumption was wrong, the
part and those after it begin again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, Self, TypeVar, runtime_checkable

from albert_serve.errors import AlbertServeError
from albert_serve.scoring.answering import Answering, Part
from albert_serve.scoring.answers import Result
from albert_serve.scoring.local import Scorer
from albert_serve.scoring.memo import Memo
from albert_serve.scoring.options import ScoreOptions
from albert_serve.scoring.rows import RowReader
from albert_serve.scoring.sources import Record

# The answers by which the next ones are foreseen.
_NUM_LAST: Final = 8
# The limit of the texts and answers of parts that are begun, in memory; one part has less.
_MAX_BEGUN_BYTES: Final = 1 << 30

WorkT = TypeVar("WorkT")


@runtime_checkable
class ParallelScorer(Scorer[WorkT], Protocol[WorkT]):
    """Answers the requests of several parts at once.

    Attributes:
        num_ahead: the limit of parts that are begun and not taken.
    """

    num_ahead: int

    def start(self, works: Sequence[WorkT]) -> Callable[[], list[Result]]:
        """Begin with a part's requests; the function that is returned waits for the results.

        It raises what `run` raises.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class _Awaited(Result):
    """The result of a row that is like one of a part that is being computed."""

    key: bytes


@dataclass(kw_only=True, slots=True)
class _Outlook:
    """Whether the answers that are being computed will be stored.

    Attributes:
        known: of single keys, for which the assumption was wrong.
        last: of the last answers; what most of them were is assumed, and that they are at first.
    """

    known: dict[bytes, bool] = field(default_factory=dict)
    last: deque[bool] = field(default_factory=lambda: deque(maxlen=_NUM_LAST))

    def is_stored(self, key: bytes) -> bool:
        return self.known.get(key, 2 * sum(self.last) >= len(self.last))

    def learn(self, key: bytes, *, assumed: bool, is_stored: bool) -> None:
        self.last.append(is_stored)
        if assumed != is_stored:
            self.known[key] = is_stored


@dataclass(kw_only=True, slots=True)
class _Ahead:
    """The answers of earlier parts, with those that are being computed.

    Attributes:
        awaited: the keys of what is being computed.
        assumed: of those that were asked for, whether their answers will be stored.
    """

    memo: Memo
    awaited: set[bytes]
    outlook: _Outlook
    assumed: dict[bytes, bool] = field(default_factory=dict)

    def get(self, key: bytes) -> Result | None:
        answer = self.memo.get(key)
        if answer is not None or key not in self.awaited:
            return answer
        self.assumed[key] = self.outlook.is_stored(key)
        return _Awaited(values={}, key=key) if self.assumed[key] else None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Begun:
    """A part that is being computed."""

    part: Part
    assumed: dict[bytes, bool]
    wait: Callable[[], list[Result]]


@dataclass(frozen=True, kw_only=True, slots=True)
class AnsweringAhead(Answering):
    """Answers records with a `ParallelScorer`; the parts are those of `Answering`."""

    def _begin(
        self, records: Iterator[Record], memo: Memo
    ) -> Iterator[tuple[Part, Callable[[], list[Result]]]]:
        window = _Window(answering=self, records=records, memo=memo)
        while (begun := window.take()) is not None:
            yield begun.part, begun.wait


def answering_for(scorer: Scorer[Any], rows: RowReader, options: ScoreOptions) -> Answering:
    """Return what answers with a scorer: several parts at once, if it can."""
    kind = AnsweringAhead if isinstance(scorer, ParallelScorer) else Answering
    return kind(
        scorer=scorer,
        rows=rows,
        part_rows=options.part_rows,
        dedupe=options.dedupe,
        error_limit=options.error_limit,
    )


@dataclass(kw_only=True, slots=True)
class _Window:
    """The parts that are being computed; as an iterator, the records of those to come.

    Attributes:
        again: records that have been read, and whose parts begin again.
        read: the records of the part that is being read.
        failure: why no more can be read, after those of `again`.
        is_at_failure: whether all parts before it have begun.
    """

    answering: AnsweringAhead
    records: Iterator[Record]
    memo: Memo
    begun: deque[_Begun] = field(default_factory=deque)
    outlook: _Outlook = field(default_factory=_Outlook)
    again: deque[Record] = field(default_factory=deque)
    read: list[Record] = field(default_factory=list)
    failure: Exception | None = None
    is_at_failure: bool = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Record:
        if self.failure is not None and not self.again:
            raise self.failure
        self.read.append(self.again.popleft() if self.again else next(self.records))
        return self.read[-1]

    def take(self) -> _Begun | None:
        """Return the next part, of which all is known but what it computes; None at the end.

        Raises:
            AlbertServeError, OSError: the input cannot be read, after all parts before.
        """
        while True:
            self._fill()
            if not self.begun:
                break
            first = self.begun.popleft()
            answers = {key: self.memo.get(key) for key in first.assumed}
            stored = {key: answer is not None for key, answer in answers.items()}
            for key, assumed in first.assumed.items():
                self.outlook.learn(key, assumed=assumed, is_stored=stored[key])
            if stored == first.assumed:
                first.part.results = [
                    answers[result.key] or result if isinstance(result, _Awaited) else result
                    for result in first.part.results
                ]
                first.part.num_later_rows = sum(len(other.part.rows) for other in self.begun)
                return first
            self._begin_again(first)
        if self.failure is not None:
            raise self.failure
        return None

    @property
    def _num_begun_bytes(self) -> int:
        return sum(begun.part.num_bytes + begun.part.num_answer_bytes for begun in self.begun)

    def _fill(self) -> None:
        scorer: ParallelScorer[Any] = self.answering.scorer  # type: ignore[assignment]
        while (
            not self.is_at_failure
            and len(self.begun) < scorer.num_ahead
            and self._num_begun_bytes < _MAX_BEGUN_BYTES
        ):
            awaited = {key for other in self.begun for key in other.part.works}
            ahead = _Ahead(memo=self.memo, awaited=awaited, outlook=self.outlook)
            self.read = []
            try:
                part = self.answering._collect(self, ahead)
            except (AlbertServeError, OSError) as error:
                self.failure, self.is_at_failure = error, True
                self.again.extend(self.read)
                return
            if not part.rows:
                return
            wait = scorer.start(list(part.works.values()))
            self.begun.append(_Begun(part=part, assumed=ahead.assumed, wait=wait))

    def _begin_again(self, first: _Begun) -> None:
        parts = [first.part, *(other.part for other in self.begun)]
        rows = [row for part in parts for row in part.rows]
        self.again.extendleft(row.record for row in reversed(rows))
        self.begun.clear()
        self.is_at_failure = False
