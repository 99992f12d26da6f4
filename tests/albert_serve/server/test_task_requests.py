"""A request's body is checked before it is worked on, and its memory is free once it is refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from starlette.requests import Request

from albert_serve.errors import (
    DeadlineExceededError,
    InvalidInputError,
    RequestError,
    TooMuchAtOnceError,
)
from albert_serve.server.bodies import BodyBudget
from albert_serve.server.models.hosted_model import HostedModel
from albert_serve.server.task_requests import answer_request
from albert_serve.server.worker_thread import WorkerThread
from tests.albert_serve.batching.engines import FakeEngine, make_batcher, make_input
from tests.albert_serve.support import without_garbage_collection

MAX_ITEMS = 3


class Held:
    """The local variables of a request's frames."""


class Refusing:
    """A model that refuses every request; `held` is what its frames held then."""

    name = "tiny"
    tasks: ClassVar = {"fill-mask": None}
    settings = SimpleNamespace(
        deadline_s=0.2, max_body_bytes=1 << 20, max_items=MAX_ITEMS, max_queue_tokens=64
    )
    check_num_items = HostedModel.check_num_items
    budget = BodyBudget(1 << 20)
    thread = WorkerThread()
    held: weakref.ref[Held]

    def __init__(self, *, is_late: bool = False) -> None:
        self._is_late = is_late

    @contextlib.contextmanager
    def in_use(self, _task: str) -> Iterator[None]:
        yield

    def prepare(self, *_: Any) -> Any:
        return []

    async def answer(self, *_: Any, ends_s: float, **__: Any) -> Any:
        held = Held()
        self.held = weakref.ref(held)
        if self._is_late:
            engine = FakeEngine()
            engine.open.clear()
            try:
                inputs = [make_input([1])]
                await make_batcher(engine).run(inputs, ends_s - time.monotonic())
            finally:
                engine.open.set()
        raise InvalidInputError("refused")


def request_of(body: Any) -> Request:
    messages = [{"type": "http.request", "body": json.dumps(body).encode()}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()
        raise AssertionError

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/fill-mask", "headers": headers}
    return Request({**scope, "albert_serve.request_id": "1"}, receive)


async def refuse(model: Any, body: Any) -> RequestError | None:
    try:
        await answer_request(model, "fill-mask", request_of(body))
    except RequestError as error:
        return type(error)(str(error))  # without the traceback, which holds the frames
    return None


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("num_chars", [1, 10_000])
def test_a_refused_or_late_request_is_freed_without_a_garbage_collection(
    num_chars: int, is_late: bool
) -> None:
    model = Refusing(is_late=is_late)
    with without_garbage_collection():
        error = asyncio.run(refuse(model, {"inputs": "a" * num_chars}))
        assert isinstance(error, DeadlineExceededError if is_late else InvalidInputError)
        assert model.held() is None


def test_too_many_items_are_refused_before_they_are_validated() -> None:
    error = asyncio.run(refuse(Refusing(), {"inputs": [{"no": "text"}] * (MAX_ITEMS + 1)}))
    assert isinstance(error, TooMuchAtOnceError)
    assert "at most 3" in str(error)
