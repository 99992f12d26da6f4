"""Answer requests with an engine in this process. Inputs of similar lengths share a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Self

from pydantic_core import to_jsonable_python

from albert_serve.api.embeddings import FEATURE_EXTRACTION
from albert_serve.api.schemas import TaskRequest
from albert_serve.bundle.manifest import Bundle, head_name
from albert_serve.bundle.weights import CLASSIFICATION
from albert_serve.errors import AlbertServeError, NotFoundError
from albert_serve.runtime.engine import Engine
from albert_serve.scoring.answers import OUTPUT, RowResult
from albert_serve.settings import RuntimeOptions
from albert_serve.tasks import (
    EncoderInput,
    Logits,
    Prepared,
    Task,
    TaskSetup,
    load_setups,
    open_task,
    prepare_request,
)
from albert_serve.tasks.base import Runner, finish_all, group_by_length, inputs_of
from albert_serve.tasks.question_answering.task import DEFAULT_MAX_SEQ_LEN
from albert_serve.tasks.text_length import text_length

# This many batches keep the engine's threads busy. More would need much memory, because fill-mask
# logits are as wide as the vocabulary.
_NUM_CONCURRENT_BATCHES: Final = 8


class LocalScorer:
    """A scorer that runs a model in this process.

    Args:
        engine: engine that runs the model.
        task: name of the task, such as "fill-mask".
        setup: tokenizer and labels of the model.
        identity: properties of the model that determine its answers, such as its revision.
        training: training section of the manifest, which contains the length of training texts.
    """

    def __init__(
        self,
        engine: Runner,
        task: str,
        setup: TaskSetup,
        identity: dict[str, str] | None = None,
        training: object = None,
    ) -> None:
        self.task = task
        self.identity = identity or {}
        names = {head_name(head, entry): head for head, entry in setup.heads.items()}
        self.heads: Sequence[str] = [*names] if task == CLASSIFICATION else []
        self._engine = engine
        self._setup = setup
        self._lengths = {
            name: text_length(head, training, setup.max_positions)
            for name, head in [(None, task), *names.items()]
        }
        self._tasks = {setup.max_positions: open_task(task, setup)}

    @classmethod
    def open(
        cls, bundle: Bundle | Path | str, task: str, options: RuntimeOptions | None = None
    ) -> Self:
        """Open a bundle for one of its tasks."""
        opened = bundle if isinstance(bundle, Bundle) else Bundle.open(Path(bundle))
        setups = load_setups(opened)
        if task not in setups:
            names = ", ".join(setups)
            raise NotFoundError(f"{opened.folder} has no {task}. Choose one of {names}.")
        engine = Engine.open(opened, options)
        identity = {"revision": opened.manifest.revision}
        training = opened.manifest.provenance.get("training")
        return cls(engine, task, setups[task], identity, training)

    def text_length(self, parameters: Mapping[str, Any]) -> int:
        """Return the maximum number of tokens in a text, given the parameters of a request.

        For question answering, this is the maximum for the question. Contexts have no maximum.
        """
        if self.task == "question-answering":
            max_positions = min(self._setup.max_positions, DEFAULT_MAX_SEQ_LEN)
            max_seq_len: int = parameters.get("max_seq_len") or max_positions
            is_error = parameters.get("truncation") in (False, "error")
            # Without truncation, a question leaves space for 3 special tokens and a context token.
            return parameters.get("max_question_len") or (
                max_seq_len - 4 if is_error else max_seq_len // 2
            )
        max_length = self._setup.sentence_vectors.max_length
        is_pooled = self.task == FEATURE_EXTRACTION and parameters.get("pooling") != "none"
        length = self._max_positions(parameters.get("head"), parameters.get("pooling"))
        return min(length, max_length) if is_pooled and max_length else length

    def _max_positions(self, head: str | None, pooling: str | None) -> int:
        """Return the maximum length of texts in training, or all positions for token vectors."""
        if pooling == "none":
            return self._setup.max_positions
        return self._lengths.get(head, self._lengths[None])

    def _task_of(self, request: TaskRequest) -> Task:
        parameters: Any = request.parameters
        length = self._max_positions(
            getattr(parameters, "head", None), getattr(parameters, "pooling", None)
        )
        if length not in self._tasks:
            setup = replace(self._setup, max_positions=length)
            self._tasks[length] = open_task(self.task, setup)
        return self._tasks[length]

    def run(self, requests: Sequence[TaskRequest]) -> list[RowResult]:
        """Return the result of each request, or its error if it failed, in order."""
        rows = [_Row(self._task_of(request), request) for request in requests]
        inputs = [(row, number) for row in rows for number in range(len(row.inputs))]
        encoder_inputs = [row.inputs[number] for row, number in inputs]
        lengths = [len(encoder_input.ids) for encoder_input in encoder_inputs]
        max_tokens = _NUM_CONCURRENT_BATCHES * self._engine.max_batch_tokens
        for group in group_by_length(lengths, max_tokens):
            outcomes = _run(self._engine, [encoder_inputs[index] for index in group])
            for index, outcome in zip(group, outcomes, strict=True):
                row, number = inputs[index]
                row.take(number, lengths[index], outcome)
        return [row.result() for row in rows]


class _Row:
    """A row's request, logits and result.

    Attributes:
        inputs: encoder inputs of all items, or none if the request is invalid.
    """

    def __init__(self, task: Task, request: TaskRequest) -> None:
        self._is_list = isinstance(request.inputs, list)
        self._items: list[Prepared[Any]] = []
        self._error: AlbertServeError | None = None
        self._num_tokens = 0
        self._logits: dict[int, Logits] = {}
        self._answers: list[Any] = []
        try:
            self._items = prepare_request(task, request)
        except AlbertServeError as error:
            self._error = error
        self.inputs = inputs_of(self._items)

    def take(self, number: int, num_tokens: int, outcome: Logits | AlbertServeError) -> None:
        """Store the logits or the error of an input, and make the answer after the last input.

        The answer is made immediately to free the logits, which can be as wide as the vocabulary.
        """
        self._num_tokens += num_tokens
        if isinstance(outcome, AlbertServeError):
            self._error = self._error or outcome
            self._logits.clear()
            return
        self._logits[number] = outcome
        if self._error is None and len(self._logits) == len(self.inputs):
            try:
                logits = [self._logits.pop(index) for index in range(len(self._logits))]
                self._answers = finish_all(self._items, logits)
            except AlbertServeError as error:
                self._error = error

    def result(self) -> RowResult:
        """Return the result. Call this after all inputs have logits or errors."""
        if self._error is not None:
            return RowResult.of_error(self._error)
        answers = self._answers
        values = {OUTPUT: to_jsonable_python(answers if self._is_list else answers[0])}
        notes: dict[str, Any] = {
            "warnings": list(dict.fromkeys(text for item in self._items for text in item.warnings)),
            "truncated_tokens": sum(item.num_truncated for item in self._items),
        }
        values |= {name: value for name, value in notes.items() if value}
        return RowResult(values=values, num_tokens=self._num_tokens)


def _run(engine: Runner, inputs: Sequence[EncoderInput]) -> list[Logits | AlbertServeError]:
    """Return the logits or the error of each input, splitting a failing batch to find the cause."""
    try:
        return list(engine.run(inputs))
    except AlbertServeError as error:
        if len(inputs) == 1:
            return [error]
    half = len(inputs) // 2
    return _run(engine, inputs[:half]) + _run(engine, inputs[half:])
