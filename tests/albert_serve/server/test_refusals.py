"""What the tasks refuse: with the status, the type, and one sentence that says why.

What is refused of each task is in api/test_schemas.py and tasks/test_every_task.py; here is what
HTTP makes of it, and what has a message of its own there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from albert_serve.api.embeddings import EMBEDDINGS_PATH
from tests.albert_serve.server.test_service import assert_envelope, post_json
from tests.albert_serve.support import MAX_ITEMS, Running

MASKED = "The [MASK] run."
LONG = "run " * 300


def inputs(value: Any, **parameters: Any) -> dict[str, Any]:
    return {"inputs": value, "parameters": parameters}


# The path, and what is invalid_input there, with a part of the message.
INVALID: list[tuple[str, Any, str]] = [
    ("/text-classification", inputs(["a", " \n"]), "is empty; send a text with at least one word"),
    ("/feature-extraction", inputs(""), "is empty; send a text with at least one word"),
    ("/fill-mask", inputs("[MASK] \ud800"), "half of a surrogate pair"),
    *(
        ("/feature-extraction", body, message)
        for body, message in [
            ({"inputs": "a", "truncate": True, "truncation": "error"}, "contradict each other"),
            ({"inputs": "a", "pooling": "cls", "parameters": {"pooling": "mean"}}, "given twice"),
            ({"inputs": ["run " * 120] * 20, "pooling": "none", "x": 1}, "'x' is not known here"),
        ]
    ),
    *(
        (EMBEDDINGS_PATH, body, message)
        for body, message in [
            ({"input": [1, 2, 3]}, "input holds token ids"),
            ({"input": ["a", 3]}, "input[1] must be a valid string"),
            ({"input": "a", "dimensions": 32}, "have 64"),
            ({"input": "a", "pooling": "none"}, "'mean', 'cls' or 'max'"),
            ([], "the body must be an object"),
        ]
    ),
]
# What has another type of error.
OTHERS: list[tuple[str, Any, int, str, str]] = [
    ("/fill-mask", inputs([MASKED, "none"]), 422, "no_mask", "inputs[1]: the text has no"),
    ("/fill-mask", inputs("a " * 200 + "[MASK]"), 422, "too_long", "reads at most 128"),
    ("/fill-mask", inputs([MASKED] * (MAX_ITEMS + 1)), 422, "too_much_at_once", "at most 32"),
    (EMBEDDINGS_PATH, {"input": ["a", LONG]}, 422, "too_long", "input[1]: the text is"),
    (EMBEDDINGS_PATH, {"input": "a", "model": "ada"}, 404, "not_found", "is 'tiny', not 'ada'"),
]


@pytest.mark.parametrize(
    ("path", "body", "status", "error_type", "message"),
    [(path, body, 422, "invalid_input", message) for path, body, message in INVALID] + OTHERS,
)
def test_what_cannot_be_answered_is_told_in_one_sentence(
    service_of: Callable[[str], Running],
    path: str,
    body: Any,
    status: int,
    error_type: str,
    message: str,
) -> None:
    with httpx.Client(base_url=service_of(path.removeprefix("/")).url, timeout=30) as client:
        reply = post_json(client, path, body)
    assert_envelope(reply, status, error_type)
    error = reply.json()["error"]
    if path == EMBEDDINGS_PATH:
        assert error.keys() == {"message", "type", "param", "code"}
        error = error["message"]
    assert message in error
    assert "\n" not in error
