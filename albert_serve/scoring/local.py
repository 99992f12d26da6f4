"""Answers by an engine in this process; inputs of like lengths run together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, Self, TypeVar

from pydantic_core import to_jsonable_python

from albert_serve.api.schemas import TaskRequest
from albert_serve.bundle.manifest import Bundle
from albert_serve.bundle.weights import CLASSIFICATION
from albert_serve.errors import AlbertServeError, NotFoundError
from albert_serve.runtime.engine import Engine
from albert_serve.scoring.answers import OUTPUT, Result
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
from albert_serve.tasks.load import load_setups, on_device
from albert_serve.tasks.text_classification import no_head

# Enough for the engine's parallel sessions, and few enough for the memory of fill-mask's
# vocabulary-wide logits.
_BATCHES_AT_ONCE: Final = 8
# Of encoded inputs: two integers of 64 bits.
_BYTES_A_TOKEN: Final = 16

WorkT = TypeVar("WorkT")


class Scorer(Protocol[WorkT]):
    """Answers the requests of one task.

    Attributes:
        task: its name.
        identity: what its answers depend on, such as the model's revision.
        heads: the names of the model's classifiers of texts, where the task is theirs.
    """

    task: str
    identity: dict[str, str]
    heads: Sequence[str]

    def prepare(self, request: TaskRequest) -> WorkT:
        """Return what `run` needs of a request.

        Raises:
            AlbertServeError: the request cannot be answered.
        """
        ...

    def cost_bytes(self, work: WorkT) -> int:
        """Return the approximate memory of an answer."""
        ...

    def run(self, works: Sequence[WorkT]) -> list[Result]:
        """Return the results, in order; of a request that failed, its error.

        Raises:
            JobError: the whole job cannot go on.
        """
        ...


def check_head(scorer: Scorer[Any], parameters: Mapping[str, Any]) -> None:
    """Check that the model has the classifier that the parameters of all rows name.

    Raises:
        InvalidInputError: it has not.
    """
    name = parameters.get("head")
    if name is not None and name not in scorer.heads:
        raise no_head(name, scorer.heads)


def error_result(error: AlbertServeError) -> Result:
    """Return the result of a row that cannot be answered."""
    return Result(values={"error": str(error), "error_type": error.error_type})


@dataclass(kw_only=True, slots=True)
class Request:
    """The prepared items of one request, and their answers."""

    items: list[Prepared[Any]]
    is_list: bool
    cuts: dict[str, int]
    answers: dict[int, Any] = field(default_factory=dict)
    error: AlbertServeError | None = None
    num_tokens: int = 0

    def result(self) -> Result:
        """Return the result; all items have answers, or there is an error."""
        if self.error is not None:
            return error_result(self.error)
        answers = [self.answers[number] for number in range(len(self.items))]
        values = {OUTPUT: to_jsonable_python(answers if self.is_list else answers[0])}
        return Result(values=values | self._notes(), num_tokens=self.num_tokens)

    def _notes(self) -> dict[str, Any]:
        notes = {
            "warnings": list(
                dict.fromkeys(warning for item in self.items for warning in item.warnings)
            ),
            "truncated_tokens": sum(item.num_truncated for item in self.items),
            "truncated_at": self.cuts,
        }
        return {name: value for name, value in notes.items() if value}


class Tokenising:
    """Reads requests as a model does, without running it.

    Args:
        task: its name, such as "fill-mask".
        setup: the model's tokenizer and labels.
        identity: the model's, such as its revision.

    Raises:
        NotFoundError: there is no such task.
    """

    def __init__(self, task: str, setup: TaskSetup, identity: dict[str, str] | None = None) -> None:
        self.task = task
        self.identity = identity or {}
        self.heads: Sequence[str] = [setup.head, *setup.heads] if task == CLASSIFICATION else []
        self._opened = open_task(task, setup)

    def prepare(self, request: TaskRequest) -> Request:
        """Tokenise a request.

        Raises:
            InvalidInputError: it cannot be answered.
        """
        items = prepare_request(self._opened, request)
        is_list = isinstance(request.inputs, list)
        return Request(items=items, is_list=is_list, cuts=read_cuts(request, items))

    def cost_bytes(self, work: Request) -> int:
        """Return the approximate memory of the encoded inputs, and of an answer."""
        return sum(item.answer_bytes + _BYTES_A_TOKEN * item.num_tokens for item in work.items)


def read_setup(bundle: Bundle, task: str) -> TaskSetup:
    """Return what a task needs of a bundle.

    Raises:
        NotFoundError: it has no such task.
    """
    setups = load_setups(bundle)
    if task not in setups:
        raise NotFoundError(f"{bundle.folder} has no {task}; it has {', '.join(setups)}")
    return setups[task]


class LocalScorer(Tokenising):
    """Answers with an engine.

    Args:
        engine: runs the model.
        task, setup, identity: see `Tokenising`.
    """

    def __init__(
        self, engine: Runner, task: str, setup: TaskSetup, identity: dict[str, str] | None = None
    ) -> None:
        super().__init__(task, setup, identity)
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
        setup = on_device(setup, engine.device)
        return cls(engine, task, setup, {"revision": opened.manifest.revision})

    def run(self, works: Sequence[Request]) -> list[Result]:
        """Run the requests' rounds until each item has an answer or an error."""
        items = [
            _Item(request=request, number=number, stage=item)
            for request in works
            for number, item in enumerate(request.items)
        ]
        while items:
            items = [item for item in self._run_round(items) if item.request.error is None]
        return [request.result() for request in works]

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

    request: Request
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
