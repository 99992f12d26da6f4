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
from itertools import chain
from typing import Any, Protocol, TypeVar

from albert_serve.errors import AlbertServeError
from albert_serve.scoring.answering import Answering, Counts, Part
from albert_serve.scoring.answers import Result
from albert_serve.scoring.local import Scorer
from albert_serve.scoring.memo import Memo
from albert_serve.scoring.sources import Record

WorkT = TypeVar("WorkT")


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
        num_stored: answers that were; at first it is assumed of all.
    """

    known: dict[bytes, bool] = field(default_factory=dict)
    num_stored: int = 4
    num_not_stored: int = 0

    def is_stored(self, key: bytes) -> bool:
        return self.known.get(key, self.num_stored >= self.num_not_stored)

    def learn(self, key: bytes, *, assumed: bool, is_stored: bool) -> None:
        self.num_stored += is_stored
        self.num_not_stored += not is_stored
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

    def parts(
        self,
        records: Iterator[Record],
        memo: Memo,
        *,
        num_before: int = 0,
        check: Callable[[Counts], None] = lambda counts: None,
    ) -> Iterator[Part]:
        """Yield the parts, answered and in order; see `Answering.parts`."""
        window = _Window(answering=self, records=records, memo=memo)
        number = num_before
        while (begun := window.take()) is not None:
            part = begun.part
            check(part.counts())
            computed = self._complete(part, begun.wait())
            check(part.counts())
            if self.dedupe:
                memo.put(number, computed)
            yield part
            number += 1


@dataclass(kw_only=True, slots=True)
class _Window:
    """The parts that are being computed.

    Attributes:
        failure: why no more can be read.
    """

    answering: AnsweringAhead
    records: Iterator[Record]
    memo: Memo
    begun: deque[_Begun] = field(default_factory=deque)
    outlook: _Outlook = field(default_factory=_Outlook)
    failure: Exception | None = None

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

    def _fill(self) -> None:
        scorer: ParallelScorer[Any] = self.answering.scorer  # type: ignore[assignment]
        while self.failure is None and len(self.begun) < scorer.num_ahead:
            awaited = {key for other in self.begun for key in other.part.works}
            ahead = _Ahead(memo=self.memo, awaited=awaited, outlook=self.outlook)
            try:
                part = self.answering._collect(self.records, ahead)
            except (AlbertServeError, OSError) as error:
                self.failure = error
                return
            if not part.rows:
                return
            wait = scorer.start(list(part.works.values()))
            self.begun.append(_Begun(part=part, assumed=ahead.assumed, wait=wait))

    def _begin_again(self, first: _Begun) -> None:
        parts = [first.part, *(other.part for other in self.begun)]
        again = [row.record for part in parts for row in part.rows]
        self.records = chain(again, self.records)
        self.begun.clear()
