"""Answers by an engine in this process; inputs of like lengths run together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Self

from pydantic_core import to_jsonable_python

from albert_serve.api.schemas import TaskRequest
from albert_serve.bundle.manifest import Bundle
from albert_serve.bundle.weights import CLASSIFICATION
from albert_serve.errors import AlbertServeError, NotFoundError
from albert_serve.runtime.engine import Engine
from albert_serve.scoring.answers import OUTPUT, RowResult
from albert_serve.settings import RuntimeOptions
from albert_serve.tasks import (
    EncoderInput,
    Logits,
    Prepared,
    Round,
    TaskSetup,
    open_task,
    prepare_request,
    read_cuts,
)
from albert_serve.tasks.base import Runner
from albert_serve.tasks.grouping import group_by_length
from albert_serve.tasks.load import load_setups

# Enough for the engine's parallel sessions, and few enough for the memory of fill-mask's
# vocabulary-wide logits.
_BATCHES_AT_ONCE: Final = 8


@dataclass(kw_only=True, slots=True)
class _Request:
    """The prepared items of one request, and their answers."""

    items: list[Prepared[Any]]
    is_list: bool
    cuts: dict[str, int]
    answers: dict[int, Any] = field(default_factory=dict)
    error: AlbertServeError | None = None
    num_tokens: int = 0

    def result(self) -> RowResult:
        """Return the result; all items have answers, or there is an error."""
        if self.error is not None:
            return RowResult.of_error(self.error)
        answers = [self.answers[number] for number in range(len(self.items))]
        values = {OUTPUT: to_jsonable_python(answers if self.is_list else answers[0])}
        return RowResult(values=values | self._notes(), num_tokens=self.num_tokens)

    def _notes(self) -> dict[str, Any]:
        notes = {
            "warnings": list(
                dict.fromkeys(warning for item in self.items for warning in item.warnings)
            ),
            "truncated_tokens": sum(item.num_truncated for item in self.items),
            "truncated_at": self.cuts,
        }
        return {name: value for name, value in notes.items() if value}


def read_setup(bundle: Bundle, task: str) -> TaskSetup:
    """Return what a task needs of a bundle.

    Raises:
        NotFoundError: it has no such task.
    """
    setups = load_setups(bundle)
    if task not in setups:
        raise NotFoundError(f"{bundle.folder} has no {task}; it has {', '.join(setups)}")
    return setups[task]


def head_names(task: str, setup: TaskSetup) -> list[str]:
    """Return the names of a model's classifiers of texts, where the task is theirs."""
    entry = setup.entry if task == CLASSIFICATION else None
    return [] if entry is None else [entry.default_head, *entry.heads]


class LocalScorer:
    """Answers with an engine.

    Args:
        engine: runs the model.
        task: its name, such as "fill-mask".
        setup: the model's tokenizer and labels.
        identity: the model's, such as its revision.

    Raises:
        NotFoundError: there is no such task.
    """

    def __init__(
        self, engine: Runner, task: str, setup: TaskSetup, identity: dict[str, str] | None = None
    ) -> None:
        self.task = task
        self.identity = identity or {}
        self.heads: Sequence[str] = head_names(task, setup)
        self._opened = open_task(task, setup)
        self._engine = engine

    @classmethod
    def open(
        cls, bundle: Bundle | Path | str, task: str, options: RuntimeOptions | None = None
    ) -> Self:
        """Open the engine of a bundle for one of its tasks.

        Raises:
            BundleError: the bundle cannot be opened.
            NotFoundError: it has no such task.
            EngineError: it cannot be run here.
        """
        opened = bundle if isinstance(bundle, Bundle) else Bundle.open(Path(bundle))
        setup = read_setup(opened, task)
        engine = Engine.open(opened, options)
        setup = replace(setup, stops_early=engine.device != "cuda")
        return cls(engine, task, setup, {"revision": opened.manifest.revision})

    def answer(self, parts: Iterable[Sequence[TaskRequest]]) -> Iterator[list[RowResult]]:
        """Yield the results of each part's requests; see `Scorer`."""
        return map(self.run, parts)

    def run(self, requests: Sequence[TaskRequest]) -> list[RowResult]:
        """Return the results of requests, in order; of one that cannot be answered, its error."""
        prepared = [self._prepare(request) for request in requests]
        items = [
            _Item(request=request, number=number, stage=item)
            for request in prepared
            for number, item in enumerate(request.items)
        ]
        # Each round runs the items that an earlier one has not answered.
        while items:
            items = [item for item in self._run_round(items) if item.request.error is None]
        return [request.result() for request in prepared]

    def _prepare(self, request: TaskRequest) -> _Request:
        is_list = isinstance(request.inputs, list)
        try:
            items = prepare_request(self._opened, request)
        except AlbertServeError as error:
            return _Request(items=[], is_list=is_list, cuts={}, error=error)
        return _Request(items=items, is_list=is_list, cuts=read_cuts(request, items))

    def _run_round(self, items: Sequence[_Item]) -> list[_Item]:
        """Run one round, like lengths together; return the items with another round."""
        places = [
            _Place(item=item, part=part, encoder_input=encoder_input)
            for item in items
            for part, encoder_input in enumerate(item.stage.inputs)
        ]
        further = []
        lengths = [len(place.encoder_input.ids) for place in places]
        max_tokens = _BATCHES_AT_ONCE * self._engine.max_batch_tokens
        for indices in group_by_length(lengths, max_tokens):
            group = [places[index] for index in indices]
            outcomes = _run(self._engine, [place.encoder_input for place in group])
            for place, outcome in zip(group, outcomes, strict=True):
                item = place.item
                item.request.num_tokens += len(place.encoder_input.ids)
                if isinstance(outcome, AlbertServeError):
                    item.request.error = item.request.error or outcome
                    continue
                item.arrived[place.part] = outcome
                # Finished at once to free the logits, which fill-mask has as wide as the
                # vocabulary.
                if len(item.arrived) == len(item.stage.inputs) and (after := _finish(item)):
                    further.append(after)
        return further


@dataclass(kw_only=True, slots=True, eq=False)
class _Item:
    """An item of a request, and its current round."""

    request: _Request
    number: int
    stage: Round[Any]
    arrived: dict[int, Logits] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """An input, and its index in an item's round."""

    item: _Item
    part: int
    encoder_input: EncoderInput


def _finish(item: _Item) -> _Item | None:
    """Store the item's answer, or return the item in its next round."""
    logits = [item.arrived[part] for part in range(len(item.arrived))]
    item.arrived.clear()
    try:
        outcome = item.stage.finish(logits)
    except AlbertServeError as error:
        item.request.error = item.request.error or error
        return None
    if isinstance(outcome, Round):
        return _Item(request=item.request, number=item.number, stage=outcome)
    item.request.answers[item.number] = outcome
    return None


def _run(engine: Runner, inputs: Sequence[EncoderInput]) -> list[Logits | AlbertServeError]:
    """Return the logits or the error of each input; bisects until failing inputs are alone."""
    try:
        return list(engine.run(inputs))
    except AlbertServeError as error:
        if len(inputs) == 1:
            return [error]
    half = len(inputs) // 2
    return _run(engine, inputs[:half]) + _run(engine, inputs[half:])
