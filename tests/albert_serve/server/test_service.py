"""The service process over real HTTP: lists, load, every refusal of a request, its end."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError

from albert_serve.api.embeddings import OpenAIErrorReply
from albert_serve.api.schemas import ErrorReply
from tests.albert_serve.support import MAX_BODY_BYTES, MAX_ITEMS, Running, served

MASKED = "The [MASK] run was scored in the first inning."
CONTEXT = "An earned run is any run that was not enabled by a fielding error."
VALID: dict[str, Any] = {
    "fill-mask": MASKED,
    "text-classification": "An earned run.",
    "question-answering": {"question": "What is an earned run?", "context": CONTEXT},
    "sentence-order": {"text": "It rained.", "text_pair": "The game was called off."},
    "feature-extraction": "It rained.",
}


@pytest.mark.parametrize("task", VALID)
def test_a_list_is_answered_as_its_items_are(client: httpx.Client, task: str) -> None:
    item = VALID[task]
    single, many = post(client, task, item), post(client, task, [item] * 3)
    assert single.status_code == 200
    one = single.json()[0] if task == "text-classification" else single.json()
    assert len(many.json()) == 3
    for answer in many.json():
        assert_close(answer, one)


def test_tasks_mix_under_load_and_none_gets_anothers_answer(client: httpx.Client) -> None:
    alone = {task: post(client, task, VALID[task]).json() for task in VALID}
    with ThreadPoolExecutor(16) as threads:
        replies = list(
            threads.map(lambda task: (task, post(client, task, VALID[task])), [*VALID] * 20)
        )
    for task, reply in replies:
        assert_close(reply.json(), alone[task])


JSON = {"content-type": "application/json"}
VALID_BODY = json.dumps({"inputs": MASKED}).encode()
UTF_16 = '{"inputs": "é"}'.encode("utf-16")
SURROGATE = b'{"inputs": "\xed\xa0\x80"}'


@pytest.mark.parametrize(
    ("status", "error_type", "request_line", "body", "headers"),
    [
        pytest.param(400, "malformed", "POST /fill-mask", b'{"inputs": ', JSON, id="cut off"),
        pytest.param(400, "malformed", "POST /fill-mask", b"", JSON, id="no body"),
        pytest.param(400, "malformed", "POST /fill-mask", b"[" * 30_000, JSON, id="deep"),
        pytest.param(400, "malformed", "POST /fill-mask", b'{"inputs": "\xff"}', JSON, id="bytes"),
        pytest.param(400, "malformed", "POST /fill-mask", UTF_16, JSON, id="UTF-16"),
        pytest.param(400, "malformed", "POST /fill-mask", SURROGATE, JSON, id="half a surrogate"),
        pytest.param(400, "malformed", "POST /fill-mask", b'{"inputs": NaN}', JSON, id="NaN"),
        pytest.param(400, "malformed", "POST /fill-mask", b'["\\', JSON, id="half an escape"),
        pytest.param(422, "invalid_input", "POST /fill-mask", b'{"inputs": 1e999}', JSON, id="inf"),
        pytest.param(404, "not_found", "POST /translation", b"{}", JSON, id="no such route"),
        pytest.param(404, "not_found", "GET /static_content/none", b"", {}, id="of BentoML"),
        pytest.param(404, "not_found", "POST /token-classification", b"{}", JSON, id="no head"),
        pytest.param(405, "method_not_allowed", "GET /fill-mask", b"", {}, id="method"),
        pytest.param(413, "body_too_large", "POST /fill-mask", b" " * 60_001, JSON, id="body"),
        *(
            pytest.param(415, "unsupported_media", "POST /fill-mask", b"{}", headers)
            for headers in (
                {"content-type": "text/plain"},
                {"content-type": "application/x-www-form-urlencoded"},
                {},
                {**JSON, "content-encoding": "gzip"},
            )
        ),
    ],
)
def test_every_refusal_of_a_request_has_the_envelope(
    client: httpx.Client,
    status: int,
    error_type: str,
    request_line: str,
    body: bytes,
    headers: dict[str, str],
) -> None:
    method, path = request_line.split()
    reply = client.request(method, path, content=body, headers=headers)
    assert_envelope(reply, status, error_type)
    assert status != 405 or reply.headers["allow"] == "POST"


@pytest.mark.parametrize("path", ["", "/", "/v1/models/tiny"])
def test_hugging_faces_client_without_a_task_is_told_the_addresses(
    service: Running, path: str
) -> None:
    hub = InferenceClient(service.url + path)
    with pytest.raises(HfHubHTTPError, match="404") as caught:
        hub.fill_mask(MASKED)
    assert f"{service.url}{path.rstrip('/')}/fill-mask, " in str(caught.value)


def test_a_mark_before_the_json_is_passed_over(client: httpx.Client) -> None:
    reply = client.post("/fill-mask", content=b"\xef\xbb\xbf" + VALID_BODY, headers=JSON)
    assert reply.status_code == 200


def test_a_body_over_the_limit_is_refused_in_chunks_too(client: httpx.Client) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(MAX_BODY_BYTES // 1000 + 1):
            yield b" " * 1000

    assert_envelope(
        client.post("/fill-mask", content=chunks(), headers=JSON), 413, "body_too_large"
    )
    assert post(client, "fill-mask", MASKED).status_code == 200


def test_request_ids_are_echoed_when_sane_and_made_otherwise(client: httpx.Client) -> None:
    reply = client.get("/health", headers={"X-Request-ID": "job-7/row-3"})
    assert reply.headers["X-Request-ID"] == "job-7/row-3"
    refused = client.post("/fill-mask", content=b"", headers={"X-Request-ID": "x" * 129})
    assert len(refused.headers["X-Request-ID"]) == 32


def test_warnings_are_told_in_a_header(client: httpx.Client) -> None:
    warned = post(client, "fill-mask", MASKED, {"targets": ["unearnedness"]})
    assert "unearnedness" in json.loads(warned.headers["X-Albert-Warnings"])[0]


def test_sigterm_finishes_what_was_accepted(bundle_dir: Path, tmp_path: Path) -> None:
    """Started as a user would start it, which shows the command line's `serve` as well."""
    num_requests = 24
    long_text = {"inputs": ["The [MASK] " + "run " * 100] * MAX_ITEMS}
    with served(bundle_dir, tmp_path, ("albert_serve", "serve")) as running:
        with ThreadPoolExecutor(num_requests) as threads:
            waiting = [
                threads.submit(httpx.post, f"{running.url}/fill-mask", json=long_text, timeout=90)
                for _ in range(num_requests)
            ]
            wait_for_requests(running, num_requests)
            assert not all(request.done() for request in waiting)
            running.process.send_signal(signal.SIGTERM)
            replies = [request.result() for request in waiting]
        assert [reply.status_code for reply in replies] == [200] * num_requests
        assert all(len(reply.json()) == MAX_ITEMS for reply in replies)
        running.process.wait(timeout=60)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{running.url}/readyz")


def post(
    client: httpx.Client, task: str, inputs: Any, parameters: dict[str, Any] | None = None
) -> httpx.Response:
    return post_json(client, f"/{task}", {"inputs": inputs, "parameters": parameters or {}})


def post_json(client: httpx.Client, path: str, body: Any) -> httpx.Response:
    """In ASCII, which can carry half of a surrogate pair."""
    return client.post(path, content=json.dumps(body), headers=JSON)


def assert_envelope(reply: httpx.Response, status: int, error_type: str) -> None:
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    assert set(reply.json()) == {"error", "error_type", "request_id"}
    is_openai = reply.request.url.path.endswith("/embeddings")
    error: Any = (OpenAIErrorReply if is_openai else ErrorReply).model_validate_json(reply.content)
    assert error.error
    assert error.error_type == error_type
    assert error.request_id == reply.headers["X-Request-ID"]


def assert_close(answer: Any, expected: Any) -> None:
    """Equal, but for what the company in a batch does to the last digits of a score."""
    if isinstance(expected, dict):
        assert answer.keys() == expected.keys()
        for name, value in expected.items():
            assert_close(answer[name], value)
    elif isinstance(expected, list):
        assert len(answer) == len(expected)
        for one, value in zip(answer, expected, strict=True):
            assert_close(one, value)
    else:
        assert answer == (
            pytest.approx(expected, abs=1e-5) if isinstance(expected, float) else expected
        )


def wait_for_requests(running: Running, num_requests: int) -> None:
    """Until, by BentoML's own metrics, that many are being answered or have been."""
    give_up_s = time.monotonic() + 20
    while time.monotonic() < give_up_s:
        arrived = 0.0
        for line in httpx.get(f"{running.url}/metrics", timeout=20).text.splitlines():
            if "/fill-mask" in line and ("_request_in_progress{" in line or "_total{" in line):
                arrived += float(line.split()[-1])
        if arrived >= num_requests:
            return
    pytest.fail("the requests did not arrive")
