"""The service's routes in this process, valid requests for each task, and checks of replies."""

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
CONTEXT = "An earned run is any run that was not enabled by a fielding error."
VALID: dict[str, Any] = {
    "fill-mask": MASKED,
    "text-classification": "An earned run.",
    "question-answering": {"question": "What is an earned run?", "context": CONTEXT},
    "sentence-order": {"text": "It rained.", "text_pair": "The game was called off."},
    "feature-extraction": "It rained.",
}


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


def assert_close(answer: Any, expected: Any) -> None:
    """Check that answers are equal, except for the last digits, which depend on the batch."""
    if isinstance(expected, dict):
        assert answer.keys() == expected.keys()
        for name, value in expected.items():
            assert_close(answer[name], value)
    elif isinstance(expected, list):
        assert len(answer) == len(expected)
        for item, value in zip(answer, expected, strict=True):
            assert_close(item, value)
    else:
        assert answer == (
            pytest.approx(expected, abs=1e-5) if isinstance(expected, float) else expected
        )
