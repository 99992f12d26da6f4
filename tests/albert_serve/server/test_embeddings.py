"""Embeddings in others' formats, and their clients."""

from __future__ import annotations

import base64
import time
from typing import Any

import httpx
import numpy as np
import pytest
from openai import NotFoundError, OpenAI

from albert_serve.api.embeddings import EMBEDDINGS_PATH, EmbeddingsReply
from tests.albert_serve.server.test_service import assert_close, assert_envelope, post
from tests.albert_serve.support import Running

TEXTS = ["It rained.", "An earned run is any run that was not enabled by a fielding error."]


def embed(client: httpx.Client, path: str = EMBEDDINGS_PATH, **body: Any) -> httpx.Response:
    return client.post(path, json=body)


def vectors(client: httpx.Client, inputs: Any, **parameters: Any) -> Any:
    reply = post(client, "feature-extraction", inputs, parameters)
    assert reply.status_code == 200, reply.text
    return np.array(reply.json())


def test_openais_format(client: httpx.Client, tokenizer: Any) -> None:
    reply = embed(client, input=TEXTS, model="tiny")
    assert reply.status_code == 200
    answered = reply.json()
    EmbeddingsReply.model_validate(answered)
    assert answered.keys() == {"object", "data", "model", "usage"}
    assert (answered["object"], answered["model"]) == ("list", "tiny")
    num_tokens = sum(len(tokenizer.encode(text)) for text in TEXTS)
    assert answered["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert [one.keys() for one in answered["data"]] == [{"object", "index", "embedding"}] * 2
    assert [(one["object"], one["index"]) for one in answered["data"]] == [
        ("embedding", 0),
        ("embedding", 1),
    ]
    expected = vectors(client, TEXTS, normalize=True)
    np.testing.assert_allclose([one["embedding"] for one in answered["data"]], expected, atol=1e-5)


def test_base64_is_float32(client: httpx.Client) -> None:
    """OpenAI's own client asks for it unless told otherwise."""
    plain = embed(client, input=TEXTS, encoding_format="float", user="someone").json()
    coded = embed(client, input=TEXTS, encoding_format="base64").json()
    for one, other in zip(plain["data"], coded["data"], strict=True):
        decoded = np.frombuffer(base64.b64decode(other["embedding"]), np.float32)
        np.testing.assert_allclose(decoded, one["embedding"], atol=1e-5)
    assert plain["usage"] == coded["usage"]


def test_options_that_openai_does_not_have(client: httpx.Client) -> None:
    (only,) = embed(client, input="It rained.", pooling="cls", dimensions=64).json()["data"]
    expected = vectors(client, "It rained.", pooling="cls", normalize=True)
    np.testing.assert_allclose(only["embedding"], expected, atol=1e-5)
    cut = embed(client, input=["a", "run " * 300], truncation=True)
    assert int(cut.headers["X-Albert-Truncated-Tokens"]) > 100


@pytest.mark.parametrize("path", ["/v1", "/v1/models/tiny"])
def test_openais_own_client(service: Running, client: httpx.Client, path: str) -> None:
    with OpenAI(base_url=f"{service.url}{path}", api_key="none", max_retries=0) as caller:
        reply = caller.embeddings.create(model="tiny", input=TEXTS)
        result = [one.embedding for one in reply.data]
        np.testing.assert_allclose(result, vectors(client, TEXTS, normalize=True), atol=1e-5)
        with pytest.raises(NotFoundError, match="the model that answers here is 'tiny'") as caught:
            caller.embeddings.create(model="another", input=TEXTS)
    assert caught.value.type == "not_found"
    assert caught.value.request_id


def test_openais_client_lists_the_models(service: Running, client: httpx.Client) -> None:
    with OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as caller:
        (listed,) = caller.models.list()
        assert (listed.id, listed.object, listed.owned_by) == ("tiny", "model", "albert-serve")
        assert 0 < listed.created <= time.time()
        retrieved = caller.models.retrieve("tiny")
        assert retrieved.created == listed.created
        assert retrieved.model_extra is not None
        assert retrieved.model_extra["tasks"] == client.get("/info").json()["tasks"]
        with pytest.raises(NotFoundError) as caught:
            caller.models.retrieve("another")
    assert caught.value.body == "there is no model 'another'. Choose one of tiny."


def test_parameters_are_taken_inside_and_beside(client: httpx.Client) -> None:
    inside = {"inputs": TEXTS, "parameters": {"pooling": "cls", "normalize": True}}
    at_the_top = {"inputs": TEXTS, "pooling": "cls", "normalize": True, "prompt_name": None}
    mixed = {"inputs": TEXTS, "pooling": "cls", "parameters": {"normalize": True}}
    expected, *others = (
        client.post("/feature-extraction", json=body).json() for body in (inside, at_the_top, mixed)
    )
    for reply in others:
        assert_close(reply, expected)


@pytest.mark.parametrize("path", ["/embed", "/v1/models/tiny/embed"])
def test_the_format_of_text_embeddings_inference(client: httpx.Client, path: str) -> None:
    """A list also for one text, of length 1 unless `normalize` says otherwise."""
    unit, plain = vectors(client, TEXTS, normalize=True), vectors(client, TEXTS)
    options = {"truncate": None, "truncation_direction": "Right", "prompt_name": None}
    reply = client.post(path, json={"inputs": TEXTS, **options})
    np.testing.assert_allclose(reply.json(), unit, atol=1e-5)
    reply = client.post(path, json={"inputs": TEXTS[0]})
    np.testing.assert_allclose(reply.json(), unit[:1], atol=1e-5)
    reply = client.post(path, json={"inputs": TEXTS, "normalize": False})
    np.testing.assert_allclose(reply.json(), plain, atol=1e-5)
    assert_envelope(client.post(path, json={"inputs": []}), 422, "invalid_input")
