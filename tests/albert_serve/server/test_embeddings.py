"""Embeddings and reranking in others' formats, and their clients."""

from __future__ import annotations

import base64
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import transformers
from openai import NotFoundError, OpenAI

from albert_serve.api.embeddings import EMBEDDINGS_PATH, EmbeddingsReply
from albert_serve.api.schemas import TextInput
from albert_serve.client import AlbertClient
from albert_serve.errors import InvalidInputError
from export.bundle import export_bundle
from tests.albert_serve.server.test_service import assert_close, assert_envelope, post
from tests.albert_serve.support import Running
from training.model.checkpoint import load_checkpoint, read_config, save_checkpoint

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
    assert json.loads(cut.headers["X-Albert-Truncated-At"]).keys() == {"input[1]"}


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


QUERY = "Who won the game?"
CANDIDATES = [
    "It rained.",
    "The home team won it in the ninth inning.",
    "An earned run is any run.",
]
LONG = "run " * 300


def rerank(client: httpx.Client, path: str = "/rerank", **body: Any) -> httpx.Response:
    return client.post(path, json={"query": QUERY, "texts": CANDIDATES, **body})


@pytest.mark.parametrize("path", ["/rerank", "/v1/models/tiny/rerank"])
def test_without_a_cross_encoder_scores_are_cosines(client: httpx.Client, path: str) -> None:
    embedded = post(client, "feature-extraction", [*CANDIDATES, QUERY], {"normalize": True}).json()
    cosines = np.array(embedded[:-1]) @ np.array(embedded[-1])

    reply = rerank(client, path, truncation_direction="Right", return_text=None)

    assert reply.status_code == 200
    ranked = reply.json()
    assert [each.keys() for each in ranked] == [{"index", "score"}] * 3
    assert [each["index"] for each in ranked] == np.argsort(-cosines).tolist()
    np.testing.assert_allclose(
        [each["score"] for each in ranked], np.sort(cosines)[::-1], atol=1e-5
    )


def test_texts_come_back_if_they_are_asked_for(client: httpx.Client) -> None:
    ranked = rerank(client, return_text=True, texts=[*CANDIDATES, LONG], truncate=True)

    assert {each["index"]: each["text"] for each in ranked.json()} == dict(
        enumerate([*CANDIDATES, LONG])
    )
    assert "texts[3]" in ranked.headers["X-Albert-Truncated-At"]


def _mark(folder: Path, activation: str) -> None:
    settings = {"model_type": "CrossEncoder", "activation_fn": activation}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))


@pytest.fixture(scope="module")
def cross_encoder(checkpoint_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with one output and no `problem_type`, as sentence-transformers saves it."""
    torch.manual_seed(3)
    model = load_checkpoint(checkpoint_dir, {"text-classification": 1})
    folder = tmp_path_factory.mktemp("cross-encoder") / "checkpoint"
    labels = {"id2label": {"0": "relevant"}, "label2id": {"relevant": 0}}
    save_checkpoint(model, folder, tokenizer_from=checkpoint_dir, extra_config=labels)
    _mark(folder, "torch.nn.modules.activation.Sigmoid")
    assert "problem_type" not in read_config(folder)
    return folder


@pytest.fixture(scope="module")
def albert(cross_encoder: Path) -> Iterator[AlbertClient]:
    bundle = export_bundle(cross_encoder, cross_encoder.parent / "bundle").bundle.folder
    with AlbertClient.local(bundle, num_threads=1) as client:
        yield client


def test_a_cross_encoder_scores_pairs(albert: AlbertClient, cross_encoder: Path) -> None:
    """Its score is that of `transformers`, the sigmoid; the raw one is the output itself."""
    oracle: Any = transformers.pipeline("text-classification", str(cross_encoder), device="cpu")
    oracle.tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    pairs = [{"text": QUERY, "text_pair": text} for text in CANDIDATES]
    expected = [each["score"] for each in oracle(pairs)]

    ranked = albert.rerank(QUERY, CANDIDATES, return_text=True)
    raw = albert.rerank(QUERY, CANDIDATES, raw_scores=True)

    assert [each.index for each in ranked] == np.argsort(-np.array(expected)).tolist()
    assert [each.text for each in ranked] == [CANDIDATES[each.index] for each in ranked]
    scores = [expected[each.index] for each in ranked]
    np.testing.assert_allclose([each.score for each in ranked], scores, atol=1e-5)
    outputs = [np.log(score / (1 - score)) for score in scores]
    np.testing.assert_allclose([each.score for each in raw], outputs, atol=1e-4)
    ((best, *_),) = albert.text_classification([TextInput.model_validate(pairs[0])])
    assert best.label == "relevant"
    assert best.score == pytest.approx(expected[0], abs=1e-5)


@pytest.mark.parametrize("activation", ["torch.nn.modules.linear.Identity", None])
def test_only_a_classifier_of_pairs_reranks_with_its_own_activation(
    albert: AlbertClient, cross_encoder: Path, tmp_path: Path, activation: str | None
) -> None:
    """Without the files of a cross-encoder, it may rate single texts by stars."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(cross_encoder, folder)
    (folder / "config_sentence_transformers.json").unlink()
    if activation is not None:
        _mark(folder, activation)
    bundle = export_bundle(folder, tmp_path / "bundle").bundle.folder
    with AlbertClient.local(bundle, num_threads=1) as other:
        scores = {item.index: item.score for item in other.rerank(QUERY, CANDIDATES)}
        vectors = np.array(other.feature_extraction([*CANDIDATES, QUERY], normalize=True))
    outputs = {item.index: item.score for item in albert.rerank(QUERY, CANDIDATES, raw_scores=True)}

    expected = dict(enumerate(vectors[:-1] @ vectors[-1])) if activation is None else outputs
    assert scores == pytest.approx(expected, abs=1e-5)


def test_a_long_list_is_sent_in_parts_and_is_one_order(client: httpx.Client) -> None:
    """The service takes 32 texts in a request; `top_n` is of the whole list."""
    texts = [f"{CANDIDATES[number % len(CANDIDATES)]} {number}" for number in range(70)]
    alone = {text: rerank(client, texts=[text]).json()[0]["score"] for text in texts}
    with AlbertClient(str(client.base_url)) as albert:
        ranked = albert.rerank(QUERY, texts, return_text=True)
        best = albert.rerank(QUERY, texts, top_n=3)
        with pytest.raises(InvalidInputError, match=r"^texts\[60\]: the text is"):
            albert.rerank(QUERY, [*texts[:60], LONG])
    assert sorted(item.index for item in ranked) == list(range(70))
    assert [item.text for item in ranked] == [texts[item.index] for item in ranked]
    np.testing.assert_allclose(
        [item.score for item in ranked], sorted(alone.values(), reverse=True), atol=1e-5
    )
    assert [item.index for item in best] == [item.index for item in ranked[:3]]


def test_the_client_refuses_what_the_service_would(albert: AlbertClient) -> None:
    with pytest.raises(InvalidInputError, match="texts must be a valid list"):
        albert.rerank(QUERY, "a text")
    with pytest.raises(InvalidInputError, match=r"query and texts\[1\] together: the text is"):
        albert.rerank(QUERY, ["a", LONG])
