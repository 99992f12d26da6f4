"""Rows answered in parts: identical rows once, and an error in the place of a row's answer."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from albert_serve.api.embeddings import FeatureExtractionParameters
from albert_serve.api.schemas import TaskRequest
from albert_serve.errors import RequestError
from albert_serve.scoring.answers import RowResult
from albert_serve.scoring.errors import TooManyErrorsError
from albert_serve.scoring.options import Counts, ScoreOptions
from albert_serve.scoring.records import Record
from albert_serve.scoring.rows import Row, RowReader
from albert_serve.tasks.text_classification import no_head

# The limit of a part's text in memory.
_MAX_PART_BYTES: Final = 4 << 20
# How much more memory than a text its answer has, where that is a vector for each token.
_TOKEN_EMBEDDINGS_WEIGHT: Final = 64
# The limits of the answers that are kept for later rows.
_MAX_KEPT_BYTES: Final = 64 << 20
_MAX_ANSWER_BYTES: Final = 1 << 16


class Scorer(Protocol):
    """Answers the requests of one task.

    Attributes:
        task: its name.
        identity: what its answers depend on, such as the model's revision.
        heads: the names of the model's classifiers of texts, where the task is theirs.
    """

    task: str
    identity: dict[str, str]
    heads: Sequence[str]

    def answer(self, parts: Iterable[Sequence[TaskRequest]]) -> Iterator[list[RowResult]]:
        """Yield the results of each part's requests, in order; of one that failed, its error.

        Parts may be read before the results of earlier ones are yielded.

        Raises:
            JobError: the whole job cannot go on.
        """
        ...


def check_head(scorer: Scorer, parameters: Mapping[str, Any]) -> None:
    """Check that the model has the classifier that the parameters of all rows name.

    Raises:
        InvalidInputError: it has not.
    """
    name = parameters.get("head")
    if name is not None and name not in scorer.heads:
        raise no_head(name, scorer.heads)


@dataclass(kw_only=True, slots=True)
class ScoredPart:
    """Rows that are answered and written together.

    Attributes:
        keys: of each row, equal for rows that are computed once.
        requests: those that are computed, by key.
        known: the results of earlier rows, by key.
        results: of each row, once they are computed.
    """

    rows: list[Row] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    requests: dict[bytes, TaskRequest] = field(default_factory=dict)
    known: dict[bytes, RowResult] = field(default_factory=dict)
    results: list[RowResult] = field(default_factory=list)
    num_bytes: int = 0
    num_computed: int = 0
    num_tokens: int = 0

    def add(self, row: Row, key: bytes, known: RowResult | None) -> None:
        """Add a row, and its result if it is known."""
        self.rows.append(row)
        self.keys.append(key)
        self.num_bytes += row.record.num_bytes * _weight(row)
        if known is not None:
            self.known[key] = known
        elif not isinstance(row.request, RequestError):
            self.requests.setdefault(key, row.request)

    def complete(self, results: Sequence[RowResult]) -> dict[bytes, RowResult]:
        """Give each row its result; return those that were computed, by key."""
        computed = dict(zip(self.requests, results, strict=True))
        by_key = {**self.known, **computed}
        self.num_computed = sum(not result.is_error for result in results)
        self.num_tokens = sum(result.num_tokens for result in results)
        self.results = [
            RowResult.of_error(row.request)
            if isinstance(row.request, RequestError)
            else by_key[key]
            for row, key in zip(self.rows, self.keys, strict=True)
        ]
        return computed

    def counts(self) -> Counts:
        """Return the counts of a part that is computed."""
        errors = [result.values for result in self.results if result.is_error]
        num_asked = sum(not isinstance(row.request, RequestError) for row in self.rows)
        return Counts(
            num_rows=len(self.rows),
            num_errors=len(errors),
            num_computed=self.num_computed,
            num_duplicates=num_asked - len(self.requests),
            num_tokens=self.num_tokens,
            errors_by_type=dict(Counter(values["error_type"] for values in errors)),
            first_error=errors[0]["error"] if errors else None,
        )


def _weight(row: Row) -> int:
    parameters = getattr(row.request, "parameters", None)
    has_tokens = (
        isinstance(parameters, FeatureExtractionParameters) and parameters.pooling == "none"
    )
    return _TOKEN_EMBEDDINGS_WEIGHT if has_tokens else 1


class _RecentAnswers:
    """The last answers as JSON, within a limit of memory; errors and long ones are left out."""

    def __init__(self) -> None:
        self._answers: dict[bytes, str] = {}
        self._num_bytes = 0

    def get(self, key: bytes) -> RowResult | None:
        answer = self._answers.get(key)
        return None if answer is None else RowResult(values=json.loads(answer))

    def keep(self, computed: Mapping[bytes, RowResult]) -> None:
        for key, result in computed.items():
            answer = "" if result.is_error else json.dumps(result.values)
            if answer and len(answer) <= _MAX_ANSWER_BYTES and key not in self._answers:
                self._answers[key] = answer
                self._num_bytes += len(answer)
        while self._num_bytes > _MAX_KEPT_BYTES:
            self._num_bytes -= len(self._answers.pop(next(iter(self._answers))))


def answer_records(
    scorer: Scorer,
    reader: RowReader,
    records: Iterable[Record],
    options: ScoreOptions,
    total: Counts | None = None,
) -> Iterator[ScoredPart]:
    """Yield the parts of the input's rows, answered.

    Args:
        total: the counts of the parts before, to which those of each part are added.

    Raises:
        TooManyErrorsError: more rows are in error than are allowed.
        JobError: the job cannot go on.
    """
    total = Counts() if total is None else total
    recent = _RecentAnswers()
    begun: deque[ScoredPart] = deque()

    def requests() -> Iterator[list[TaskRequest]]:
        for part in _collect(reader, records, recent, options):
            begun.append(part)
            yield list(part.requests.values())

    _check_errors(total, options.error_limit)
    for results in scorer.answer(requests()):
        part = begun.popleft()
        computed = part.complete(results)
        if options.dedupe:
            recent.keep(computed)
        total.add(part.counts())
        _check_errors(total, options.error_limit)
        yield part


def _check_errors(total: Counts, limit: int | None) -> None:
    """Refuse more rows with errors than are allowed.

    Args:
        limit: None for any number.

    Raises:
        TooManyErrorsError: there are more.
    """
    if limit is not None and total.num_errors > limit:
        allowed = f"; {limit} are allowed" if limit else ""
        raise TooManyErrorsError(
            f"{total.num_errors} rows are in error{allowed}; the first: {total.first_error}"
        )


def _collect(
    reader: RowReader, records: Iterable[Record], recent: _RecentAnswers, options: ScoreOptions
) -> Iterator[ScoredPart]:
    """Yield the rows in parts, which are not computed."""
    part = ScoredPart()
    for record in records:
        row = reader.read(record)
        key = row.key if options.dedupe else len(part.rows).to_bytes(8)
        part.add(row, key, recent.get(key))
        if len(part.rows) >= options.part_rows or part.num_bytes >= _MAX_PART_BYTES:
            yield part
            part = ScoredPart()
    if part.rows:
        yield part
