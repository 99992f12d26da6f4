"""Reranking: by a cross-encoder or by embeddings, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import transformers

from albert_serve.api.schemas import TextInput
from albert_serve.client import AlbertClient
from albert_serve.errors import InvalidInputError
from export.bundle import export_bundle
from tests.albert_serve.server.test_service import assert_envelope, post
from training.model.checkpoint import load_checkpoint, read_config, save_checkpoint

QUERY = "Who won the game?"
TEXTS = ["It rained.", "The home team won it in the ninth inning.", "An earned run is any run."]
LONG = "run " * 300


def rerank(client: httpx.Client, path: str = "/rerank", **body: Any) -> httpx.Response:
    return client.post(path, json={"query": QUERY, "texts": TEXTS, **body})


@pytest.mark.parametrize("path", ["/rerank", "/v1/models/tiny/rerank"])
def test_without_a_cross_encoder_scores_are_cosines(client: httpx.Client, path: str) -> None:
    embedded = post(client, "feature-extraction", [*TEXTS, QUERY], {"normalize": True}).json()
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
    ranked = rerank(client, return_text=True, texts=[*TEXTS, LONG], truncate=True)

    assert {each["index"]: each["text"] for each in ranked.json()} == dict(
        enumerate([*TEXTS, LONG])
    )
    assert "texts[3]" in ranked.headers["X-Albert-Truncated-At"]


@pytest.mark.parametrize(
    ("body", "error_type", "message"),
    [
        ({"texts": []}, "invalid_input", "texts must hold at least one item"),
        ({"texts": None}, "invalid_input", "texts is missing"),
        ({"texts": "a text"}, "invalid_input", "texts must be a valid list"),
        ({"texts": ["a", 3]}, "invalid_input", "texts[1] must be a valid string, not 3"),
        ({"query": ["a"]}, "invalid_input", "query must be a valid string"),
        ({"raw_scores": "yes"}, "invalid_input", "raw_scores must be a valid boolean"),
        ({"truncation_direction": "left"}, "invalid_input", "truncation_direction must be"),
        ({"top_n": 0}, "invalid_input", "top_n must be greater than or equal to 1"),
        ({"top": 3}, "invalid_input", "'top' is not known here"),
        ({"texts": ["a", LONG]}, "too_long", "texts[1]: the text is"),
        ({"query": LONG}, "too_long", "or set the parameter truncate to true"),
        ({"texts": ["a"] * 33}, "too_much_at_once", "texts holds 33 items; at most 32"),
    ],
)
def test_refusals(
    client: httpx.Client, body: dict[str, Any], error_type: str, message: str
) -> None:
    reply = rerank(client, **body)

    assert_envelope(reply, 422, error_type)
    assert message in reply.json()["error"]


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
    pairs = [{"text": QUERY, "text_pair": text} for text in TEXTS]
    expected = [each["score"] for each in oracle(pairs)]

    ranked = albert.rerank(QUERY, TEXTS, return_text=True)
    raw = albert.rerank(QUERY, TEXTS, raw_scores=True)

    assert [each.index for each in ranked] == np.argsort(-np.array(expected)).tolist()
    assert [each.text for each in ranked] == [TEXTS[each.index] for each in ranked]
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
        scores = {item.index: item.score for item in other.rerank(QUERY, TEXTS)}
        vectors = np.array(other.feature_extraction([*TEXTS, QUERY], normalize=True))
    outputs = {item.index: item.score for item in albert.rerank(QUERY, TEXTS, raw_scores=True)}

    expected = dict(enumerate(vectors[:-1] @ vectors[-1])) if activation is None else outputs
    assert scores == pytest.approx(expected, abs=1e-5)


def test_a_long_list_is_sent_in_parts_and_is_one_order(client: httpx.Client) -> None:
    """The service takes 32 texts in a request; `top_n` is of the whole list."""
    texts = [f"{TEXTS[number % len(TEXTS)]} {number}" for number in range(70)]
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
