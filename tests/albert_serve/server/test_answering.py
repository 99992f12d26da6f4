"""A request's body is checked before it is worked on, and its memory is free once it is refused."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from albert_serve.errors import InvalidInputError, TooMuchAtOnceError
from albert_serve.server.answering import answer_request
from albert_serve.server.models.hosted_model import HostedModel
from albert_serve.server.process.threads import RequestThreads

MAX_ITEMS = 3


class Held:
    """The local variables of a request's frames."""


class Refusing:
    """A model that refuses every request; `held` is what its frames held then."""

    name = "tiny"
    tasks = ("fill-mask",)
    settings = SimpleNamespace(
        deadline_s=5.0, max_body_bytes=1 << 20, max_items=MAX_ITEMS, max_queue_tokens=64
    )
    check_num_items = HostedModel.check_num_items
    threads = RequestThreads()
    held: weakref.ref[Held]

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        yield

    async def answer(self, *_: Any) -> Any:
        held = Held()
        self.held = weakref.ref(held)
        await asyncio.sleep(0)
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


async def refuse(model: Any, body: Any) -> InvalidInputError | None:
    try:
        await answer_request(model, "fill-mask", request_of(body))
    except InvalidInputError as error:
        return type(error)(str(error))  # without the traceback, which holds the frames
    return None


def test_a_refused_request_is_freed_without_a_garbage_collection() -> None:
    model = Refusing()
    gc.collect()
    gc.disable()
    try:
        error = asyncio.run(refuse(model, {"inputs": "a [MASK]"}))
        assert str(error) == "refused"
        assert model.held() is None
    finally:
        gc.enable()


def test_too_many_items_are_refused_before_they_are_validated() -> None:
    error = asyncio.run(refuse(Refusing(), {"inputs": [{"no": "text"}] * (MAX_ITEMS + 1)}))
    assert isinstance(error, TooMuchAtOnceError)
    assert "at most 3" in str(error)


@pytest.mark.parametrize("num_bytes", [1, 100_000])
def test_too_many_values_are_refused_before_they_are_parsed(num_bytes: int) -> None:
    body = {"inputs": "a" * num_bytes, "parameters": {"targets": [0] * 3000}}
    error = asyncio.run(refuse(Refusing(), body))
    assert isinstance(error, TooMuchAtOnceError)
    assert "values" in str(error)
