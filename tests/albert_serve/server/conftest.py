"""The service's routes in this process, and checks of replies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from albert_serve.api.embeddings import OpenAIErrorReply
from albert_serve.api.schemas import ErrorReply
from tests.albert_serve.support import local_client

JSON = {"content-type": "application/json"}
MASKED = "The [MASK] run was scored in the first inning."
TEXTS = ["It rained.", "An earned run is any run that was not enabled by a fielding error."]


@pytest.fixture(scope="session")
def local(bundle_dir: Path) -> Iterator[httpx.Client]:
    """A client of the small model's routes in this process, with the default limits."""
    with local_client(bundle_dir) as http:
        yield http


def post(client: httpx.Client, task: str, inputs: Any, **parameters: Any) -> httpx.Response:
    return client.post(f"/{task}", json={"inputs": inputs, "parameters": parameters})


def assert_envelope(reply: httpx.Response, status: int, error_type: str) -> str:
    """Check an error reply, and that its message is one line. Return the message."""
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    assert set(reply.json()) == {"error", "error_type", "request_id"}
    is_openai = reply.request.url.path.endswith("/embeddings")
    error: Any = (OpenAIErrorReply if is_openai else ErrorReply).model_validate_json(reply.content)
    assert error.error_type == error_type
    assert error.request_id == reply.headers["X-Request-ID"]
    message: str = error.error.message if is_openai else error.error
    assert message
    assert "\n" not in message
    return message
