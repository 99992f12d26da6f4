"""Requests over HTTP: bodies, limits, headers, other APIs' formats, classifiers and errors."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from pyarrow import parquet as pq

from albert_serve.api.embeddings import EMBEDDINGS_PATH, EmbeddingsReply
from albert_serve.cli import main
from albert_serve.tokenizer import AlbertTokenizer
from tests.albert_serve.client.support import assert_same
from tests.albert_serve.server.conftest import JSON, MASKED, TEXTS, assert_envelope, post
from tests.albert_serve.support import local_client
from tests.export.exporting import export_bundle
from training.model.checkpoint import load_checkpoint, save_checkpoint

MAX_BODY_BYTES = 4_194_304
MAX_ITEMS = 1024
BODY = json.dumps({"inputs": MASKED}).encode()
LONG = "🎉🎉 " + "a " * 200
TRUNCATED = "X-Albert-Truncated-Tokens"


def test_a_body_that_is_not_json_is_400(local: httpx.Client) -> None:
    for body in (b'{"inputs": ', '{"inputs": "é"}'.encode("utf-16"), b'{"inputs": NaN}'):
        assert_envelope(local.post("/fill-mask", content=body, headers=JSON), 400, "malformed")


def test_errors_of_a_path_a_method_or_a_media_type_have_the_envelope(local: httpx.Client) -> None:
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
    largest = b" " * (MAX_BODY_BYTES - len(BODY)) + BODY
    headers = {"content-type": "Application/JSON; charset=utf-8", "content-encoding": "identity"}
    assert local.post("/fill-mask", content=largest, headers=headers).status_code == 200
    reply = local.post("/fill-mask", content=b" " + largest, headers=JSON)
    assert str(MAX_BODY_BYTES) in assert_envelope(reply, 413, "body_too_large")
    for path, name in (("/fill-mask", "inputs"), ("/embed", "inputs"), (EMBEDDINGS_PATH, "input")):
        reply = local.post(path, json={name: [None] * MAX_ITEMS})
        assert_envelope(reply, 422, "invalid_input")  # the error is about the items
        reply = local.post(path, json={name: [None] * (MAX_ITEMS + 1)})
        message = assert_envelope(reply, 422, "too_much_at_once")
        assert message.startswith(f"{name} ")
        assert f"{MAX_ITEMS + 1} items" in message


def test_the_error_names_the_item_or_the_value_that_is_invalid(local: httpx.Client) -> None:
    cases: list[tuple[str, Any, int, str, str]] = [
        ("/fill-mask", {"inputs": [MASKED, "none"]}, 422, "no_mask", "inputs[1]: "),
        (EMBEDDINGS_PATH, {"input": [1, 2, 3]}, 422, "invalid_input", "token ids"),
        (EMBEDDINGS_PATH, {"input": "a", "dimensions": 32}, 422, "invalid_input", "64"),
        (EMBEDDINGS_PATH, {"input": ["a", LONG]}, 422, "too_long", "input[1]: "),
        (EMBEDDINGS_PATH, {"input": "a", "model": "ada"}, 404, "not_found", "'ada'"),
    ]
    for path, body, status, error_type, message in cases:
        assert message in assert_envelope(local.post(path, json=body), status, error_type)


def test_the_error_for_a_request_without_a_task_lists_the_addresses(local: httpx.Client) -> None:
    reply = local.post("/v1/models/tiny", json={"inputs": MASKED})
    address = "http://local/v1/models/tiny/fill-mask, "
    assert address in assert_envelope(reply, 404, "not_found")


def test_a_valid_request_id_is_returned_and_others_are_replaced(local: httpx.Client) -> None:
    for valid in ("job-7/row-3", "~" * 128):
        reply = local.get("/health", headers={"X-Request-ID": valid})
        assert reply.headers["X-Request-ID"] == valid
    for invalid in ("x" * 129, "a b"):
        reply = local.post("/fill-mask", content=b"", headers={"X-Request-ID": invalid})
        assert len(reply.headers["X-Request-ID"]) == 32


def test_headers_report_warnings_and_the_number_of_truncated_tokens(
    local: httpx.Client, tokenizer: AlbertTokenizer
) -> None:
    long_text = f"{MASKED} {LONG}"
    texts = [MASKED, long_text, long_text]
    reply = post(local, "fill-mask", texts, targets=["unearnedness"], truncation=True)
    (warning,) = json.loads(reply.headers["X-Albert-Warnings"])
    assert "unearnedness" in warning
    encoding = tokenizer.encode_plain(long_text)
    assert int(reply.headers[TRUNCATED]) == 2 * (len(encoding) + 2 - 128)
    offset, _ = encoding.offsets[128 - 2]
    fitting = post(local, "fill-mask", long_text[:offset].rstrip(), top_k=1)
    assert not {TRUNCATED, "X-Albert-Warnings"} & {*fitting.headers}
    expected = post(local, "fill-mask", long_text, top_k=1, truncation=True).json()
    assert_same(fitting.json(), expected)


def embed(client: httpx.Client, inputs: Any, **parameters: Any) -> Any:
    """Return embeddings in our format."""
    return np.array(post(client, "feature-extraction", inputs, **parameters).json())


def test_embeddings_in_openais_format(local: httpx.Client, tokenizer: AlbertTokenizer) -> None:
    body: dict[str, Any] = {"input": TEXTS, "model": "tiny", "user": "someone"}
    reply = local.post(EMBEDDINGS_PATH, json=body).json()
    EmbeddingsReply.model_validate(reply)
    num_tokens = sum(len(tokenizer.encode(text)) for text in TEXTS)
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    expected = embed(local, TEXTS, normalize=True)
    data = [
        {"object": "embedding", "index": index, "embedding": pytest.approx(list(row), abs=1e-5)}
        for index, row in enumerate(expected)
    ]
    assert reply == {"object": "list", "data": data, "model": "tiny", "usage": usage}
    reply = local.post(EMBEDDINGS_PATH, json={**body, "encoding_format": "base64"}).json()
    contents = [base64.b64decode(item["embedding"]) for item in reply["data"]]
    embeddings = [np.frombuffer(content, np.float32) for content in contents]
    np.testing.assert_allclose(embeddings, expected, atol=1e-5)
    body = {"input": TEXTS[0], "pooling": "cls", "dimensions": 64}
    (item,) = local.post(EMBEDDINGS_PATH, json=body).json()["data"]
    expected = embed(local, TEXTS[0], pooling="cls", normalize=True)
    np.testing.assert_allclose(item["embedding"], expected, atol=1e-5)


def test_embeddings_in_the_formats_of_hugging_face_and_text_embeddings_inference(
    local: httpx.Client,
) -> None:
    """In `/embed`, one text also gets a list, and embeddings have length 1 by default."""
    left = embed(local, LONG, normalize=True, truncation=True, truncation_direction="left")
    truncate = {"inputs": LONG, "truncate": True, "truncation": True}
    cls = embed(local, TEXTS, pooling="cls", normalize=True)
    mixed = {"inputs": TEXTS, "pooling": "cls", "parameters": {"normalize": True}}
    for path, body, expected in (
        ("/feature-extraction", mixed, cls),
        ("/embed", {"inputs": TEXTS[0]}, embed(local, TEXTS[:1], normalize=True)),
        ("/embed", {"inputs": TEXTS, "normalize": False}, embed(local, TEXTS)),
        ("/embed", {**truncate, "truncation_direction": "Left"}, [left]),
    ):
        reply = local.post(path, json=body)
        np.testing.assert_allclose(reply.json(), expected, atol=1e-5)
    twice = {**mixed, "normalize": False}
    error = local.post("/feature-extraction", json=twice).json()["error"]
    assert error == "normalize is in parameters and next to inputs. Send it only once."
    reply = local.post("/feature-extraction", json={**truncate, "truncation": False})
    assert "contradict each other" in assert_envelope(reply, 422, "invalid_input")


# The labels of three classifiers, the default one first. In config.json, `rating` has no labels.
LABELS = {
    "sentiment": ["negative", "positive"],
    "rating": ["LABEL_0"],
    "topic": ["sport", "politics", "music"],
}


@pytest.fixture(scope="module")
def classifiers_dir(checkpoint_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model with two additional classifiers, as a bundle."""
    torch.manual_seed(3)
    heads = {f"text-classification/{name}": len(LABELS[name]) for name in ("rating", "topic")}
    model = load_checkpoint(checkpoint_dir, {**load_checkpoint(checkpoint_dir).tasks, **heads})
    sentiment, topic = (
        {"id2label": {str(index): label for index, label in enumerate(LABELS[name])}}
        for name in ("sentiment", "topic")
    )
    config = {**sentiment, "albert_default_head": "sentiment", "albert_heads": {"topic": topic}}
    folder = tmp_path_factory.mktemp("classifiers")
    save_checkpoint(
        model.eval(), folder / "checkpoint", tokenizer_from=checkpoint_dir, extra_config=config
    )
    return export_bundle(folder / "checkpoint", folder / "bundle").bundle.folder


def test_each_of_several_classifiers_is_listed_and_answers_with_its_labels(
    classifiers_dir: Path, local: httpx.Client
) -> None:
    with local_client(classifiers_dir) as classifiers:
        for name in (*LABELS, None):
            reply = post(classifiers, "text-classification", TEXTS, head=name)
            for scores in reply.json():
                assert {item["label"] for item in scores} == {*LABELS[name or "sentiment"]}
        several, single = (
            {task["name"]: task["heads"] for task in http.get("/info").json()["tasks"]}
            for http in (classifiers, local)
        )
    heads = several["text-classification"]
    assert {head["name"]: head["labels"] for head in heads} == LABELS
    assert heads[1]["problem_type"] == "multi_label_classification"
    assert {*single.values()} == {None}
    assert post(local, "text-classification", "a", head="default").status_code == 200


def test_the_score_command_uses_the_classifier_of_its_option(
    classifiers_dir: Path, tmp_path: Path
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"text": "a film"}\n')
    words = ["score", "--bundle", str(classifiers_dir), "--task", "text-classification"]
    assert main([*words, "--head", "topic", "--all-scores", str(source), str(target)]) == 0
    row = json.loads(target.read_text())
    assert {item["label"] for item in row["output"]} == {*LABELS["topic"]}


def test_the_score_command_writes_a_list_of_entities_for_each_row(
    token_bundle: Path, tmp_path: Path
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.parquet"
    text = "Anna Berg lives in Vienna. She came in 1932."
    source.write_text(json.dumps({"text": text}))
    words = ["score", "--task", "token-classification", "--bundle", str(token_bundle)]
    assert main([*words, "--parameters", '{"ignore_labels": []}', str(source), str(target)]) == 0
    [entities] = pq.read_table(target)["entities"].to_pylist()
    assert entities
    assert all(text[item["start"] : item["end"]] == item["word"] for item in entities)
