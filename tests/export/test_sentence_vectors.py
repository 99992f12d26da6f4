"""Folders of `sentence-transformers`: the bundle answers as the library does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from albert_serve.bundle.sentence_vectors import SentenceVectors, write_sentence_vectors
from albert_serve.cli import main
from albert_serve.client import AlbertClient
from albert_serve.errors import TextTooLongError
from albert_serve.local import LocalTransport
from albert_serve.settings import RuntimeOptions
from tests.export.exporting import export_bundle
from training.model.checkpoint import load_checkpoint, save_checkpoint

TEXTS = ["Heathrow is an airport.", "The airport was opened in 1946, and is west of London. " * 2]


def write_sentence_model(checkpoint: Path, folder: Path, vectors: SentenceVectors) -> Path:
    shutil.copytree(checkpoint, folder)
    write_sentence_vectors(vectors, folder, hidden_size=24)
    return folder


@pytest.mark.parametrize(
    "vectors",
    [
        SentenceVectors(),
        SentenceVectors(pooling="cls", max_length=16),
        SentenceVectors(pooling="max", normalize=True, max_length=24),
    ],
    ids=lambda vectors: vectors.pooling,
)
def test_vectors_are_those_of_sentence_transformers(
    real_checkpoint: Path, tmp_path: Path, vectors: SentenceVectors
) -> None:
    """The library's folder may have the format of version 6, or the encoder in a subfolder."""
    library = pytest.importorskip("sentence_transformers", reason="pip install --group dev")

    def encode(folder: Path) -> Any:
        return library.SentenceTransformer(str(folder), device="cpu").encode(TEXTS)

    source = write_sentence_model(real_checkpoint, tmp_path / "source", vectors)
    expected = encode(source)
    library.SentenceTransformer(str(source), device="cpu").save(str(tmp_path / "saved"))
    inner = Path(shutil.copytree(source, tmp_path / "nested")) / "0_Transformer"
    inner.mkdir()
    for file in [*inner.parent.glob("*.json"), *inner.parent.glob("*.safetensors")]:
        if file.name != "modules.json":
            file.rename(inner / file.name)
    modules = json.loads((source / "modules.json").read_text())
    modules[0]["path"] = inner.name
    (inner.parent / "modules.json").write_text(json.dumps(modules))

    for folder in (source, tmp_path / "saved", inner.parent):
        bundle = export_bundle(folder, tmp_path / f"bundle-of-{folder.name}").bundle
        with AlbertClient.local(bundle.folder, num_threads=1) as albert:
            answers = albert.feature_extraction(TEXTS, truncation=True)
        np.testing.assert_allclose(answers, expected, atol=1e-4)
        np.testing.assert_allclose(encode(bundle.folder), expected, atol=1e-5)
        assert bundle.manifest.sentence_vectors == vectors


@pytest.mark.parametrize("activation", [torch.nn.Sigmoid(), torch.nn.Identity()], ids=str)
def test_a_cross_encoder_is_a_classifier_of_pairs(
    real_checkpoint: Path, tmp_path: Path, activation: torch.nn.Module
) -> None:
    """The score has the activation that was saved with the model."""
    torch.manual_seed(3)
    model = load_checkpoint(real_checkpoint, {"text-classification": 1})
    label = {"id2label": {"0": "relevant"}, "label2id": {"relevant": 0}}
    save_checkpoint(model, tmp_path / "plain", tokenizer_from=real_checkpoint, extra_config=label)
    library = pytest.importorskip("sentence_transformers", reason="pip install --group dev")
    oracle = library.CrossEncoder(str(tmp_path / "plain"), activation_fn=activation, device="cpu")
    oracle.save(str(tmp_path / "saved"))
    oracle.tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    expected = oracle.predict([("When was it opened?", text) for text in TEXTS])

    bundle = export_bundle(tmp_path / "saved", tmp_path / "bundle").bundle
    with AlbertClient.local(bundle.folder, num_threads=1) as albert:
        pairs = [{"text": "When was it opened?", "text_pair": text} for text in TEXTS]
        answers = albert.text_classification(pairs)
    assert [[score.label for score in answer] for answer in answers] == [["relevant"]] * 2
    np.testing.assert_allclose([answer[0].score for answer in answers], expected, atol=1e-5)


def test_every_request_for_embeddings_has_the_models_settings_as_defaults(
    real_checkpoint: Path, tmp_path: Path
) -> None:
    """The model gives normalised vectors of [CLS], for texts of at most 16 tokens."""
    vectors = SentenceVectors(pooling="cls", normalize=True, max_length=16)
    source = write_sentence_model(real_checkpoint, tmp_path / "source", vectors)
    bundle = export_bundle(source, tmp_path / "bundle", precision="int8").bundle.folder
    with AlbertClient.local(bundle, num_threads=1) as albert:
        expected = albert.feature_extraction(TEXTS[0])
        own = albert.feature_extraction(TEXTS[0], pooling="mean", normalize=False)
        tokens = np.array(albert.token_features(TEXTS[0]))
        with pytest.raises(TextTooLongError, match="at most 16"):
            albert.feature_extraction(TEXTS[1])
        assert len(albert.feature_extraction(TEXTS[1], truncation=True)) == 24
        assert len(albert.token_features(TEXTS[1])) > 16
        [task] = [task for task in albert.info().tasks if task.name == "feature-extraction"]
    transport = LocalTransport(bundle, RuntimeOptions(num_threads=1))
    with httpx.Client(transport=transport, base_url="http://local") as client:
        openai = client.post("/v1/embeddings", json={"input": TEXTS[0]}).json()["data"][0]
    rows, scored = tmp_path / "rows.jsonl", tmp_path / "scored.jsonl"
    rows.write_text(json.dumps({"inputs": TEXTS[0]}))
    score = ["score", "--task", "feature-extraction", "--bundle", str(bundle)]
    assert main([*score, str(rows), str(scored)]) == 0

    np.testing.assert_allclose(expected, tokens[0] / np.linalg.norm(tokens[0]), atol=1e-5)
    np.testing.assert_allclose(own, tokens.mean(0), atol=1e-5)
    np.testing.assert_allclose(openai["embedding"], expected, atol=1e-5)
    np.testing.assert_allclose(json.loads(scored.read_text())["output"], expected, atol=1e-5)
    assert task.sentence_vectors is not None
    assert task.sentence_vectors.max_length == 16
