"""Rows answered in parts: identical rows once, and an error in the place of a row's answer."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from albert_serve.api.schemas import TaskRequest
from albert_serve.errors import RequestError
from albert_serve.scoring.answers import RowResult
from albert_serve.scoring.errors import TooManyErrorsError
from albert_serve.scoring.inputs import RowBatch
from albert_serve.scoring.options import Counts, ScoreOptions
from albert_serve.scoring.rows import RowReader
from albert_serve.tasks.text_classification import no_head

# Limits of the cache of answers.
_MAX_KEPT_BYTES: Final = 64 << 20
_MAX_ANSWER_BYTES: Final = 1 << 16


class Scorer(Protocol):
    """Answers the requests of one task.

    Attributes:
        task: its name.
        identity: what its answers depend on, such as the model's revision.
        heads: names of the model's text classifiers, if the task is text classification.
    """

    task: str
    identity: dict[str, str]
    heads: Sequence[str]

    def run(self, requests: Sequence[TaskRequest]) -> list[RowResult]:
        """Return the results of requests, in order; of one that failed, its error."""
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
    """Rows with their results, which are written together."""

    batch: RowBatch = field(default_factory=RowBatch)
    results: list[RowResult] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)


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


class _PendingPart:
    """Rows whose requests are computed.

    Attributes:
        requests: those that are computed, by a key that is equal for rows that have one answer.
    """

    def __init__(
        self, batch: RowBatch, reader: RowReader, recent: _RecentAnswers, *, dedupe: bool
    ) -> None:
        self._batch = batch
        self._keys: list[bytes] = []
        self._known: dict[bytes, RowResult] = {}
        self._num_refused = 0
        self.requests: dict[bytes, TaskRequest] = {}
        for index in range(len(batch.values)):
            key = index.to_bytes(4)
            try:
                request = reader.request(batch, index)
            except RequestError as error:
                self._known[key] = RowResult.of_error(error)
                self._num_refused += 1
            else:
                key = _key(request) if dedupe else key
                if (answer := recent.get(key)) is not None:
                    self._known[key] = answer
                else:
                    self.requests.setdefault(key, request)
            self._keys.append(key)

    def complete(self, computed: Mapping[bytes, RowResult]) -> ScoredPart:
        """Return the rows with their results."""
        by_key = {**self._known, **computed}
        results = [by_key[key] for key in self._keys]
        errors = [result.values for result in results if result.is_error]
        counts = Counts(
            num_rows=len(results),
            num_errors=len(errors),
            num_computed=sum(not result.is_error for result in computed.values()),
            num_duplicates=len(results) - self._num_refused - len(computed),
            num_tokens=sum(result.num_tokens for result in computed.values()),
            errors_by_type=dict(Counter(values["error_type"] for values in errors)),
            first_error=errors[0]["error"] if errors else None,
        )
        return ScoredPart(batch=self._batch, results=results, counts=counts)


def _key(request: TaskRequest) -> bytes:
    content = request.model_dump(exclude_unset=True)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).digest()


def answer_batches(
    scorer: Scorer,
    reader: RowReader,
    batches: Iterable[RowBatch],
    options: ScoreOptions,
    total: Counts | None = None,
) -> Iterator[ScoredPart]:
    """Yield the rows of the input with their results.

    Args:
        total: the counts of the parts before, to which those of each part are added.

    Raises:
        TooManyErrorsError: more rows are in error than are allowed.
        JobError: the job cannot go on.
    """
    total = Counts() if total is None else total
    recent = _RecentAnswers()
    _check_errors(total, options.error_limit)
    for batch in batches:
        pending = _PendingPart(batch, reader, recent, dedupe=options.dedupe)
        results = scorer.run(list(pending.requests.values()))
        computed = dict(zip(pending.requests, results, strict=True))
        if options.dedupe:
            recent.keep(computed)
        part = pending.complete(computed)
        total.add(part.counts)
        _check_errors(total, options.error_limit)
        yield part


def _check_errors(total: Counts, limit: int | None) -> None:
    if limit is not None and total.num_errors > limit:
        allowed = f"; {limit} are allowed" if limit else ""
        raise TooManyErrorsError(
            f"{total.num_errors} rows are in error{allowed}; the first: {total.first_error}"
        )
