"""A body is JSON in UTF-8, or it is malformed; one that does not end is forgotten."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from albert_serve.errors import DeadlineExceededError
from albert_serve.server.bodies import parse_json, read_body
from tests.albert_serve.support import without_garbage_collection

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_what_came_of_an_unfinished_body_is_freed_without_a_garbage_collection(
    is_cancelled: bool,
) -> None:
    chunk = bytes(bytearray(1000))
    chunks = iter([chunk])

    async def receive() -> dict[str, Any]:
        for part in chunks:
            return {"type": "http.request", "body": part, "more_body": True}
        await asyncio.Event().wait()
        raise AssertionError

    async def run() -> None:
        headers = [(b"content-type", b"application/json")]
        request = Request({"type": "http", "method": "POST", "headers": headers}, receive)
        work = read_body(request, max_bytes=10_000, deadline_s=0.05, count=lambda _: None)
        reading = asyncio.create_task(work)
        if is_cancelled:
            asyncio.get_running_loop().call_later(0.01, reading.cancel)
        await asyncio.wait({reading})
        assert reading.cancelled() or isinstance(reading.exception(), DeadlineExceededError)

    num_references = sys.getrefcount(chunk)
    with without_garbage_collection():
        asyncio.run(run())
        assert sys.getrefcount(chunk) == num_references - 1  # that of `chunks`


@given(value=values, is_ascii=st.booleans())
def test_json_is_read_as_it_was_written(value: Any, is_ascii: bool) -> None:
    assert parse_json(json.dumps(value, ensure_ascii=is_ascii).encode()) == value
