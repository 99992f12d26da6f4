"""Answer rows in parts. A row that cannot be answered gets an error instead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from albert_serve.api.schemas import TaskRequest
from albert_serve.errors import RequestError
from albert_serve.scoring.answers import RowResult
from albert_serve.scoring.errors import TooManyErrorsError
from albert_serve.scoring.inputs import RowBatch
from albert_serve.scoring.options import Counts, ScoreOptions
from albert_serve.scoring.rows import RowReader
from albert_serve.tasks.text_classification import no_head


class Scorer(Protocol):
    """The interface of a scorer, which answers requests of one task.

    Attributes:
        task: name of the task.
        identity: properties of the model that determine its answers, such as its revision.
        heads: names of the model's text classifiers, if the task is text classification.
    """

    task: str
    identity: dict[str, str]
    heads: Sequence[str]

    def text_length(self, parameters: Mapping[str, Any]) -> int:
        """Return the maximum number of tokens in a text, given the parameters of a request."""
        ...

    def run(self, requests: Sequence[TaskRequest]) -> list[RowResult]:
        """Return the result of each request, or its error if it failed, in order."""
        ...


def check_head(scorer: Scorer, parameters: Mapping[str, Any]) -> None:
    """Check that the model has the classifier that the job's parameters name."""
    name = parameters.get("head")
    if name is not None and name not in scorer.heads:
        raise no_head(name, scorer.heads)


@dataclass(kw_only=True, slots=True)
class ScoredPart:
    """Rows and their results, which are written together."""

    batch: RowBatch = field(default_factory=RowBatch)
    results: list[RowResult] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)


def answer_batches(
    scorer: Scorer,
    reader: RowReader,
    batches: Iterable[RowBatch],
    options: ScoreOptions,
    total: Counts | None = None,
) -> Iterator[ScoredPart]:
    """Yield the rows of each batch with their results.

    Args:
        total: counts of the previous parts, to which the counts of each new part are added.
    """
    total = Counts() if total is None else total
    _check_errors(total, options.error_limit)
    for batch in batches:
        part = _answer(scorer, reader, batch)
        total.add(part.counts)
        _check_errors(total, options.error_limit)
        yield part


def _answer(scorer: Scorer, reader: RowReader, batch: RowBatch) -> ScoredPart:
    """Return rows with their results. The result of an invalid request is an error."""
    results: dict[int, RowResult] = {}
    requests: dict[int, TaskRequest] = {}
    for index in range(len(batch.values)):
        try:
            requests[index] = reader.request(batch, index)
        except RequestError as error:
            results[index] = RowResult.of_error(error)
    results |= zip(requests, scorer.run(list(requests.values())), strict=True)
    ordered = [results[index] for index in range(len(batch.values))]
    errors = [result.values for result in ordered if result.is_error]
    counts = Counts(
        num_rows=len(ordered),
        num_errors=len(errors),
        num_tokens=sum(result.num_tokens for result in ordered),
        num_truncated=sum("truncated_tokens" in result.values for result in ordered),
        errors_by_type=dict(Counter(values["error_type"] for values in errors)),
        first_error=errors[0]["error"] if errors else None,
    )
    return ScoredPart(batch=batch, results=ordered, counts=counts)


def _check_errors(total: Counts, limit: int | None) -> None:
    if limit is not None and total.num_errors > limit:
        allowed = f", but only {limit} may fail" if limit else ""
        raise TooManyErrorsError(
            f"{total.num_errors} of {total.num_rows} rows failed{allowed}. "
            f"The first error: {total.first_error}"
        )
