"""The service process over real HTTP: Hugging Face's own clients, every refusal, its end."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import HfHubHTTPError

from albert_serve.api.embeddings import OpenAIErrorReply
from albert_serve.api.schemas import ErrorReply, InfoReply
from tests.albert_serve.support import (
    MAX_BODY_BYTES,
    MAX_ITEMS,
    SERVICE,
    Running,
    free_port,
    running_service,
    service_environment,
)

MASKED = "The [MASK] run was scored in the first inning."
CONTEXT = "An earned run is any run that was not enabled by a fielding error."
VALID: dict[str, Any] = {
    "fill-mask": MASKED,
    "text-classification": "An earned run.",
    "question-answering": {"question": "What is an earned run?", "context": CONTEXT},
    "sentence-order": {"text": "It rained.", "text_pair": "The game was called off."},
    "feature-extraction": "It rained.",
}


def test_hugging_faces_client_fills_masks(service: Running) -> None:
    client = InferenceClient(f"{service.url}/fill-mask")
    filled = client.fill_mask(MASKED, top_k=3)
    assert len(filled) == 3
    assert [one.score for one in filled] == sorted((one.score for one in filled), reverse=True)
    targets = client.fill_mask(MASKED, targets=["run", "the"])
    assert {one.token_str for one in targets} == {"run", "the"}
    several = client.fill_mask("The [MASK] run was [MASK].")
    assert isinstance(several[0], list)
    assert [len(predictions) for predictions in several] == [5, 5]


def test_hugging_faces_client_classifies(service: Running) -> None:
    client = InferenceClient(f"{service.url}/text-classification")
    labels = client.text_classification(VALID["text-classification"])
    assert {one.label for one in labels} == {"negative", "positive"}
    assert sum(one.score for one in labels) == pytest.approx(1)
    assert len(client.text_classification(VALID["text-classification"], top_k=1)) == 1


def test_hugging_faces_client_answers_questions(service: Running) -> None:
    client = InferenceClient(f"{service.url}/question-answering")
    answer = client.question_answering(question="What is it?", context=CONTEXT)
    assert not isinstance(answer, list)
    assert CONTEXT[answer.start : answer.end] == answer.answer
    assert len(client.question_answering(question="What?", context=CONTEXT, top_k=2)) == 2


def test_the_threshold_decides_whether_there_is_an_answer(client: httpx.Client) -> None:
    answers = [
        client.post(
            "/question-answering",
            json={
                "inputs": VALID["question-answering"],
                "parameters": {
                    "handle_impossible_answer": True,
                    "null_score_diff_threshold": threshold,
                },
            },
        ).json()
        for threshold in (-1000, 1000)
    ]
    assert [bool(answer["answer"]) for answer in answers] == [False, True]
    assert answers[0]["score"] == pytest.approx(1)
    assert (answers[0]["start"], answers[0]["end"]) == (0, 0)


def test_hugging_faces_asynchronous_client_gets_the_same(service: Running) -> None:
    async def ask() -> tuple[Any, Any, Any]:
        async with (
            AsyncInferenceClient(f"{service.url}/fill-mask") as masks,
            AsyncInferenceClient(f"{service.url}/text-classification") as labels,
            AsyncInferenceClient(f"{service.url}/question-answering") as answers,
        ):
            return await asyncio.gather(
                masks.fill_mask(MASKED),
                labels.text_classification(VALID["text-classification"]),
                answers.question_answering(question="What is it?", context=CONTEXT),
            )

    masks, labels, answer = asyncio.run(ask())
    assert masks == InferenceClient(f"{service.url}/fill-mask").fill_mask(MASKED)
    assert len(labels) == 2
    assert CONTEXT[answer.start : answer.end] == answer.answer


def test_hugging_faces_client_finds_health_and_info_and_shows_our_errors(service: Running) -> None:
    client = InferenceClient(service.url, provider="hf-inference")
    assert client.health_check() is True
    assert client.get_endpoint_info()["max_positions"] == 128
    with pytest.raises(HfHubHTTPError, match=r"the text has no \[MASK\]"):
        InferenceClient(f"{service.url}/fill-mask").fill_mask("no mask")


@pytest.mark.parametrize("task", VALID)
def test_a_list_is_answered_as_its_items_are(client: httpx.Client, task: str) -> None:
    single = post(client, task, VALID[task])
    assert single.status_code == 200
    many = post(client, task, [VALID[task]] * 3)
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


def test_info_health_and_bentomls_own_routes(client: httpx.Client) -> None:
    info = InfoReply.model_validate_json(client.get("/info").content)
    assert {task.name for task in info.tasks} == set(VALID)
    assert (info.max_items, info.max_body_bytes) == (MAX_ITEMS, MAX_BODY_BYTES)
    for path in ("/health", "/livez", "/readyz", "/docs", "/", "/static_content/swagger-ui.css"):
        assert client.get(path).status_code == 200, path


def test_bentomls_metrics_count_the_endpoints(client: httpx.Client) -> None:
    post(client, "sentence-order", VALID["sentence-order"])
    counted = [
        line
        for line in client.get("/metrics").text.splitlines()
        if line.startswith("bentoml_service_request_total") and 'endpoint="/sentence-order"' in line
    ]
    assert any('http_response_code="200"' in line for line in counted)


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("status", "error_type", "path", "body"),
    [
        pytest.param(400, "malformed", "/fill-mask", b'{"inputs": ', id="cut off"),
        pytest.param(400, "malformed", "/fill-mask", b"", id="no body"),
        pytest.param(400, "malformed", "/fill-mask", b"[" * 30_000, id="deep"),
        pytest.param(400, "malformed", "/fill-mask", b'{"inputs": "\xff"}', id="not UTF-8"),
        pytest.param(404, "not_found", "/translation", b"{}", id="no such route"),
        pytest.param(413, "body_too_large", "/fill-mask", b" " * 60_001, id="body"),
    ],
)
def test_every_refusal_of_a_body_has_the_envelope(
    client: httpx.Client, status: int, error_type: str, path: str, body: bytes
) -> None:
    assert_envelope(client.post(path, content=body, headers=JSON), status, error_type)


@pytest.mark.parametrize("media", ["text/plain", "application/x-www-form-urlencoded", None])
def test_what_is_not_declared_as_json_is_refused(client: httpx.Client, media: str | None) -> None:
    headers = {"content-type": media} if media else {}
    reply = client.post("/fill-mask", content=b'{"inputs": "[MASK]"}', headers=headers)
    assert_envelope(reply, 415, "unsupported_media")


def test_refusals_of_the_router_and_of_bentoml_have_the_envelope(client: httpx.Client) -> None:
    reply = client.get("/fill-mask")
    assert_envelope(reply, 405, "method_not_allowed")
    assert reply.headers["allow"] == "POST"
    assert_envelope(client.get("/static_content/none"), 404, "not_found")


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
    environment = service_environment(bundle_dir, tmp_path / "home")
    num_requests = 6
    long_text = {"inputs": ["The [MASK] " + "run " * 100] * MAX_ITEMS}
    with running_service(environment, tmp_path, ("albert_serve", "serve")) as running:
        assert f"curl {running.url}/fill-mask" in running.log
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


def test_a_damaged_bundle_is_refused_at_the_start_in_one_line(
    bundle_dir: Path, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(bundle_dir, damaged)
    content = bytearray((damaged / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (damaged / "model.safetensors").unlink()
    (damaged / "model.safetensors").write_bytes(content)
    ended = subprocess.run(
        [sys.executable, "-m", "bentoml", "serve", SERVICE, "--port", str(free_port())],
        env=service_environment(damaged, tmp_path / "home"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert ended.returncode == 1
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert "model.safetensors has SHA-256" in line
    assert "Traceback" not in ended.stderr + ended.stdout


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
