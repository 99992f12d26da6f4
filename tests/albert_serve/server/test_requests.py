"""What HTTP makes of a request: its body, its format, its head, and the error replies."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from pyarrow import parquet as pq

from albert_serve.api.embeddings import EMBEDDINGS_PATH, EmbeddingsReply
from albert_serve.api.schemas import InfoReply
from albert_serve.cli import main
from albert_serve.tokenizer import AlbertTokenizer
from tests.albert_serve.server.classifiers import LABELS, classifiers, export_classifiers
from tests.albert_serve.server.conftest import (
    JSON,
    MASKED,
    VALID,
    assert_close,
    assert_envelope,
    post,
)
from tests.albert_serve.support import local_http

MAX_BODY_BYTES = 4_194_304
MAX_ITEMS = 1024
BODY = json.dumps({"inputs": MASKED}).encode()
LONG = "🎉🎉 " + "a " * 200
TEXTS = ["It rained.", "An earned run is any run that was not enabled by a fielding error."]
TRUNCATED = "X-Albert-Truncated-Tokens"


@pytest.mark.parametrize(
    "body",
    [
        b'{"inputs": ',
        '{"inputs": "é"}'.encode("utf-16"),
        b'{"inputs": NaN}',
    ],
    ids=["cut off", "UTF-16", "NaN"],
)
def test_a_body_that_is_not_json_is_400(local: httpx.Client, body: bytes) -> None:
    assert_envelope(local.post("/fill-mask", content=body, headers=JSON), 400, "malformed")


def test_refusals_of_a_path_a_method_or_a_type_have_the_envelope(local: httpx.Client) -> None:
    for headers in ({"content-type": "text/plain"}, {}, {**JSON, "content-encoding": "gzip"}):
        reply = local.post("/fill-mask", content=BODY, headers=headers)
        assert_envelope(reply, 415, "unsupported_media")
    for path in ("/translation", "/token-classification"):
        reply = local.post(path, content=BODY, headers=JSON)
        assert path.removeprefix("/") in assert_envelope(reply, 404, "not_found")
    reply = local.get("/fill-mask")
    assert "POST" in assert_envelope(reply, 405, "method_not_allowed")
    assert reply.headers["allow"] == "POST"


def test_the_limits_of_bytes_and_items_are_exact(local: httpx.Client) -> None:
    for num_more, status in ((0, 200), (1, 413)):
        body = b" " * (MAX_BODY_BYTES + num_more - len(BODY)) + BODY
        reply = local.post("/fill-mask", content=body, headers=JSON)
        assert reply.status_code == status
    assert str(MAX_BODY_BYTES) in assert_envelope(reply, 413, "body_too_large")
    for path, name in (("/fill-mask", "inputs"), (EMBEDDINGS_PATH, "input")):
        reply = local.post(path, json={name: [None] * MAX_ITEMS})
        assert_envelope(reply, 422, "invalid_input")  # of the items, which are read
        reply = local.post(path, json={name: [None] * (MAX_ITEMS + 1)})
        message = assert_envelope(reply, 422, "too_much_at_once")
        assert message.startswith(f"{name} ")
        assert f"{MAX_ITEMS + 1} items" in message


@pytest.mark.parametrize(
    ("path", "body", "status", "error_type", "message"),
    [
        ("/fill-mask", {"inputs": [MASKED, "none"]}, 422, "no_mask", "inputs[1]: "),
        (EMBEDDINGS_PATH, {"input": [1, 2, 3]}, 422, "invalid_input", "token ids"),
        (EMBEDDINGS_PATH, {"input": "a", "dimensions": 32}, 422, "invalid_input", "64"),
        (EMBEDDINGS_PATH, {"input": ["a", LONG]}, 422, "too_long", "input[1]: "),
        (EMBEDDINGS_PATH, {"input": "a", "model": "ada"}, 404, "not_found", "'ada'"),
    ],
)
def test_what_cannot_be_answered_is_told_in_one_line(
    local: httpx.Client, path: str, body: Any, status: int, error_type: str, message: str
) -> None:
    assert message in assert_envelope(local.post(path, json=body), status, error_type)


def test_a_list_is_answered_as_its_items_are(local: httpx.Client) -> None:
    for task, item in VALID.items():
        single, many = post(local, task, item), post(local, task, [item] * 3)
        one = single.json()[0] if task == "text-classification" else single.json()
        assert_close(many.json(), [one] * 3)


def test_a_request_without_a_task_gets_the_addresses(local: httpx.Client) -> None:
    reply = local.post("/v1/models/tiny", json={"inputs": MASKED})
    address = "http://local/v1/models/tiny/fill-mask, "
    assert address in assert_envelope(reply, 404, "not_found")


def test_request_ids_are_echoed_when_sane_and_made_otherwise(local: httpx.Client) -> None:
    for sane in ("job-7/row-3", "~" * 128):
        assert local.get("/health", headers={"X-Request-ID": sane}).headers["X-Request-ID"] == sane
    for bad in ("x" * 129, "a b"):
        refused = local.post("/fill-mask", content=b"", headers={"X-Request-ID": bad})
        assert len(refused.headers["X-Request-ID"]) == 32


def test_warnings_and_truncated_tokens_are_told_in_headers(
    local: httpx.Client, tokenizer: AlbertTokenizer
) -> None:
    """Of all the texts of a list; an answer without has none, and the part that fits is its own."""
    many = [MASKED, f"{MASKED} {LONG}", f"{MASKED} {LONG}"]
    reply = post(local, "fill-mask", many, targets=["unearnedness"], truncation=True)
    (warning,) = json.loads(reply.headers["X-Albert-Warnings"])
    assert "unearnedness" in warning
    encoding = tokenizer.encode_plain(many[1])
    assert int(reply.headers[TRUNCATED]) == 2 * (len(encoding) + 2 - 128)
    offset, _ = encoding.offsets[128 - 2]
    fitting = post(local, "fill-mask", many[1][:offset].rstrip(), top_k=1)
    assert not {TRUNCATED, "X-Albert-Warnings"} & {*fitting.headers}
    expected = post(local, "fill-mask", many[1], top_k=1, truncation=True).json()
    assert_close(fitting.json(), expected)


def vectors(client: httpx.Client, inputs: Any, **parameters: Any) -> Any:
    reply = post(client, "feature-extraction", inputs, **parameters)
    assert reply.status_code == 200, reply.text
    return np.array(reply.json())


def embed(client: httpx.Client, **body: Any) -> Any:
    return client.post(EMBEDDINGS_PATH, json=body).json()


def test_openais_format(local: httpx.Client, tokenizer: AlbertTokenizer) -> None:
    answered = embed(local, input=TEXTS, model="tiny", user="someone")
    EmbeddingsReply.model_validate(answered)
    num_tokens = sum(len(tokenizer.encode(text)) for text in TEXTS)
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    expected = vectors(local, TEXTS, normalize=True)
    data = [
        {"object": "embedding", "index": index, "embedding": pytest.approx(list(row), abs=1e-5)}
        for index, row in enumerate(expected)
    ]
    assert answered == {"object": "list", "data": data, "model": "tiny", "usage": usage}
    coded = embed(local, input=TEXTS, encoding_format="base64")
    decoded = [base64.b64decode(item["embedding"]) for item in coded["data"]]
    result = [np.frombuffer(content, np.float32) for content in decoded]
    np.testing.assert_allclose(result, expected, atol=1e-5)
    (only,) = embed(local, input=TEXTS[0], pooling="cls", dimensions=64)["data"]
    expected = vectors(local, TEXTS[0], pooling="cls", normalize=True)
    np.testing.assert_allclose(only["embedding"], expected, atol=1e-5)


def test_parameters_are_taken_inside_and_beside(local: httpx.Client) -> None:
    expected = vectors(local, TEXTS, pooling="cls", normalize=True)
    body = {"inputs": TEXTS, "pooling": "cls", "parameters": {"normalize": True}}
    reply = local.post("/feature-extraction", json=body)
    np.testing.assert_allclose(reply.json(), expected, atol=1e-5)


def test_the_format_of_text_embeddings_inference(local: httpx.Client) -> None:
    """A list also for one text, of length 1 unless `normalize` says otherwise."""
    unit, plain = vectors(local, TEXTS, normalize=True), vectors(local, TEXTS)
    left = vectors(local, LONG, normalize=True, truncation=True, truncation_direction="left")
    cut = {"truncate": True, "truncation_direction": "Left"}
    for options, expected in (
        ({"inputs": TEXTS[0]}, unit[:1]),
        ({"inputs": TEXTS, "normalize": False}, plain),
        ({"inputs": LONG, **cut}, [left]),
    ):
        reply = local.post("/embed", json=options)
        np.testing.assert_allclose(reply.json(), expected, atol=1e-5)


@pytest.fixture(scope="module")
def heads_dir(checkpoint_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of three classifiers."""
    folder = tmp_path_factory.mktemp("heads")
    return export_classifiers(classifiers(checkpoint_dir), checkpoint_dir, folder).folder


@pytest.fixture(scope="module")
def heads(heads_dir: Path) -> Iterator[httpx.Client]:
    with local_http(heads_dir) as http:
        yield http


def test_each_classifier_answers_with_its_labels(heads: httpx.Client) -> None:
    for name in (*LABELS, None):
        reply = post(heads, "text-classification", TEXTS, head=name)
        for scores in reply.json():
            assert {item["label"] for item in scores} == {*LABELS[name or "sentiment"]}


def test_info_lists_the_classifiers_where_there_are_several(
    heads: httpx.Client, local: httpx.Client
) -> None:
    listed, single = (
        {task.name: task.heads for task in InfoReply.model_validate(http.get("/info").json()).tasks}
        for http in (heads, local)
    )
    assert {*single.values()} == {None}
    classifier = listed["text-classification"]
    assert classifier is not None
    assert {head.name: head.labels for head in classifier} == LABELS
    assert classifier[1].problem_type == "multi_label_classification"
    assert post(local, "text-classification", "a", head="default").status_code == 200


def test_files_are_scored_by_a_head(heads_dir: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"text": "a film"}\n')
    words = ["score", "--bundle", str(heads_dir), "--task", "text-classification"]
    assert main([*words, "--head", "topic", "--all-scores", str(source), str(target)]) == 0
    row = json.loads(target.read_text())
    assert {item["label"] for item in row["output"]} == {*LABELS["topic"]}


def test_files_have_a_list_of_entities_a_row(token_bundle: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.parquet"
    text = "Anna Berg lives in Vienna. She came in 1932."
    source.write_text(json.dumps({"text": text}))
    words = ["score", "--task", "token-classification", "--bundle", str(token_bundle)]
    assert main([*words, "--parameters", '{"ignore_labels": []}', str(source), str(target)]) == 0
    [entities] = pq.read_table(target)["entities"].to_pylist()
    assert entities
    assert all(text[item["start"] : item["end"]] == item["word"] for item in entities)
