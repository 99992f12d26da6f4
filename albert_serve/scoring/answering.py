"""Rows answered part by part: the same parts for the same rows, and identical rows once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

from albert_serve.errors import AlbertServeError
from albert_serve.scoring.answers import Result
from albert_serve.scoring.errors import TooManyErrorsError
from albert_serve.scoring.local import Scorer, error_result
from albert_serve.scoring.memo import Memo
from albert_serve.scoring.rows import Row, RowReader
from albert_serve.scoring.sources import Record

PART_ROWS: Final = 1024
# The limits of a part's text, and of its answers, in memory.
_MAX_PART_BYTES: Final = 4 << 20
_MAX_ANSWER_BYTES: Final = 1 << 28


@dataclass(kw_only=True, slots=True)
class Counts:
    """Counts of rows that were answered, or not.

    Attributes:
        num_computed: rows that the model ran for; the others are errors, or like an earlier row.
        num_tokens: the tokens that were computed, where it is known.
        first_error: the message of the first row with an error.
    """

    num_rows: int = 0
    num_errors: int = 0
    num_computed: int = 0
    num_duplicates: int = 0
    num_tokens: int = 0
    errors_by_type: dict[str, int] = field(default_factory=dict)
    first_error: str | None = None

    def add(self, other: Counts) -> None:
        """Add the counts of further rows."""
        self.num_rows += other.num_rows
        self.num_errors += other.num_errors
        self.num_computed += other.num_computed
        self.num_duplicates += other.num_duplicates
        self.num_tokens += other.num_tokens
        self.errors_by_type = dict(Counter(self.errors_by_type) + Counter(other.errors_by_type))
        self.first_error = self.first_error or other.first_error


@dataclass(kw_only=True, slots=True)
class Part:
    """Rows that are answered and written together.

    Attributes:
        results: of each row; while they are computed, the key of those that are not there yet.
        works: what is computed, by key.
        num_later_rows: rows after it that have been read.
    """

    rows: list[Row] = field(default_factory=list)
    results: list[Result | bytes] = field(default_factory=list)
    works: dict[bytes, Any] = field(default_factory=dict)
    num_duplicates: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    num_answer_bytes: int = 0
    num_later_rows: int = 0

    @property
    def answered(self) -> list[Result]:
        """The results that are there."""
        return [result for result in self.results if isinstance(result, Result)]

    def counts(self) -> Counts:
        """Return the counts of the results that are there."""
        errors = [result.values for result in self.answered if result.is_error]
        return Counts(
            num_rows=len(self.rows),
            num_errors=len(errors),
            num_computed=len(self.works),
            num_duplicates=self.num_duplicates,
            num_tokens=self.num_tokens,
            errors_by_type=dict(Counter(values["error_type"] for values in errors)),
            first_error=errors[0]["error"] if errors else None,
        )


class Answers(Protocol):
    """The answers of earlier parts."""

    def get(self, key: bytes) -> Result | None:
        """Return the answer to a request; None if there is none."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Answering:
    """Answers records.

    Attributes:
        part_rows: the limit of a part's rows.
        dedupe: whether identical rows are computed once.
        error_limit: the rows with errors that do not end the job; None for any number.
    """

    scorer: Scorer[Any]
    rows: RowReader
    part_rows: int = PART_ROWS
    dedupe: bool = True
    error_limit: int | None = None

    def parts(
        self,
        records: Iterator[Record],
        memo: Memo,
        *,
        total: Counts | None = None,
        num_before: int = 0,
    ) -> Iterator[Part]:
        """Yield the parts, answered.

        Args:
            memo: the answers of the parts before.
            total: the counts of the parts before, to which those of each part are added.
            num_before: the number of the parts before.

        Raises:
            TooManyErrorsError: more rows are in error than are allowed.
            JobError: the job cannot go on.
        """
        total = Counts() if total is None else total
        for number, (part, wait) in enumerate(self._begin(records, memo), start=num_before):
            self.check_errors(total, part.counts())
            computed = self._complete(part, wait())
            self.check_errors(total, part.counts())
            if self.dedupe:
                memo.put(number, computed)
            total.add(part.counts())
            yield part

    def check_errors(self, total: Counts, counts: Counts) -> None:
        """Refuse further rows with errors, if there are too many.

        Raises:
            TooManyErrorsError: there are.
        """
        num_errors = total.num_errors + counts.num_errors
        if self.error_limit is not None and num_errors > self.error_limit:
            first = total.first_error or counts.first_error
            allowed = f"; {self.error_limit} are allowed" if self.error_limit else ""
            raise TooManyErrorsError(f"{num_errors} rows are in error{allowed}; the first: {first}")

    def _begin(
        self, records: Iterator[Record], memo: Memo
    ) -> Iterator[tuple[Part, Callable[[], list[Result]]]]:
        """Yield the parts, each with the function that computes what it lacks."""
        while (part := self._collect(records, memo)).rows:
            yield part, partial(self.scorer.run, list(part.works.values()))

    def _complete(self, part: Part, results: Sequence[Result]) -> list[tuple[bytes, Result]]:
        """Give the rows of a part their results; return what was computed, by key."""
        computed = dict(zip(part.works, results, strict=True))
        part.num_tokens = sum(result.num_tokens for result in results)
        part.results = [
            computed[result] if isinstance(result, bytes) else result for result in part.results
        ]
        return list(computed.items())

    def _collect(self, records: Iterator[Record], memo: Answers) -> Part:
        """Read the rows of the next part."""
        part = Part()
        for record in records:
            row = self.rows.read(record)
            part.rows.append(row)
            part.results.append(self._start(part, row, memo))
            part.num_bytes += record.num_bytes
            if (
                len(part.rows) >= self.part_rows
                or part.num_bytes >= _MAX_PART_BYTES
                or part.num_answer_bytes >= _MAX_ANSWER_BYTES
            ):
                break
        return part

    def _start(self, part: Part, row: Row, memo: Answers) -> Result | bytes:
        """Return a row's result if it is known, else the key under which it is computed."""
        if row.request is None:
            return error_result(row.error or AlbertServeError("the row has no request"))
        key = row.key if self.dedupe else len(part.rows).to_bytes(8)
        known = memo.get(key) if self.dedupe else None
        if known is not None or key in part.works:
            part.num_duplicates += 1
            return known or key
        try:
            work = self.scorer.prepare(row.request)
        except AlbertServeError as error:
            return error_result(error)
        part.works[key] = work
        part.num_answer_bytes += self.scorer.cost_bytes(work)
        return key
