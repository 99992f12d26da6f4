"""Exports of `sentence-transformers` folders, compared with the library; folders with errors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from albert_serve.bundle.sentence_vectors import (
    SentenceVectors,
    read_sentence_vectors,
    write_sentence_vectors,
)
from albert_serve.client import AlbertClient
from albert_serve.errors import ConfigError
from tests.export.exporting import export_bundle
from training.conversion.source import open_checkpoint
from training.model.checkpoint import load_checkpoint, save_checkpoint

TEXTS = ["Heathrow is an airport.", "The airport was opened in 1946, and is west of London. " * 2]


@pytest.mark.parametrize(
    "vectors",
    [
        SentenceVectors(),
        SentenceVectors(pooling="cls", max_length=16),
        SentenceVectors(pooling="max", normalize=True, max_length=24),
    ],
    ids=lambda vectors: vectors.pooling,
)
def test_embeddings_equal_those_of_sentence_transformers(
    real_checkpoint: Path, tmp_path: Path, vectors: SentenceVectors
) -> None:
    """Tests our folder, the library's own format, and a folder with the encoder in a subfolder."""
    library = pytest.importorskip("sentence_transformers", reason="pip install --group dev")

    def encode(folder: Path) -> Any:
        return library.SentenceTransformer(str(folder), device="cpu").encode(TEXTS)

    source = tmp_path / "source"
    shutil.copytree(real_checkpoint, source)
    write_sentence_vectors(vectors, source, hidden_size=24)
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
            [task] = [task for task in albert.info().tasks if task.name == "feature-extraction"]
        np.testing.assert_allclose(answers, expected, atol=1e-4)
        np.testing.assert_allclose(encode(bundle.folder), expected, atol=1e-5)
        assert bundle.manifest.sentence_vectors == vectors
        assert task.sentence_vectors is not None
        assert task.sentence_vectors.max_length == vectors.max_length


@pytest.mark.parametrize("activation", [torch.nn.Sigmoid(), torch.nn.Identity()], ids=str)
def test_a_cross_encoder_is_a_classifier_of_pairs_with_its_saved_activation(
    real_checkpoint: Path, tmp_path: Path, activation: torch.nn.Module
) -> None:
    torch.manual_seed(3)
    model = load_checkpoint(real_checkpoint, {"text-classification": 1})
    label = {"id2label": {"0": "relevant"}, "label2id": {"relevant": 0}}
    save_checkpoint(model, tmp_path / "plain", tokenizer_from=real_checkpoint, extra_config=label)
    with open_checkpoint(tmp_path / "plain") as plain:  # a checkpoint without an activation
        assert plain.folder == tmp_path / "plain"
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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the configuration files of a sentence-transformers model."""
    (tmp_path / "config.json").write_text("{}")  # the default is 512 positions
    write_sentence_vectors(SentenceVectors(), tmp_path, hidden_size=8)
    return tmp_path


@pytest.mark.parametrize(("limit", "expected"), [(3, 3), (511, 511), (512, None)])
def test_max_seq_length_is_the_maximum_length_unless_it_equals_all_positions(
    folder: Path, limit: int, expected: int | None
) -> None:
    file = folder / "sentence_bert_config.json"
    file.write_text(json.dumps({"max_seq_length": limit}))
    assert read_sentence_vectors(folder) == SentenceVectors(max_length=expected)


def test_the_pooling_is_the_mean_by_default(folder: Path) -> None:
    (folder / "1_Pooling/config.json").write_text('{"word_embedding_dimension": 8}')
    assert read_sentence_vectors(folder) == SentenceVectors()


MODULES = [
    {"path": "", "type": "sentence_transformers.models.Transformer"},
    {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"path": "2_Dense", "type": "sentence_transformers.models.Dense"},
]
PROMPT = {"prompts": {"query": "query: "}, "default_prompt_name": "query"}


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("modules.json", MODULES, "Pooling, Dense;"),
        ("modules.json", [{"path": "../other", "type": "x.Transformer"}], "path"),
        ("1_Pooling/config.json", {"pooling_mode_mean_sqrt_len_tokens": True}, "mean_sqrt_len"),
        ("config_sentence_transformers.json", PROMPT, "a prompt before every text"),
        ("config_sentence_transformers.json", {"truncate_dim": 8}, "has truncate_dim 8,"),
        ("config_setfit.json", {"labels": ["dry", "wet"]}, "copy the folder without"),
    ],
)
def test_the_error_names_the_file_with_an_unsupported_setting(
    folder: Path, file: str, content: Any, message: str
) -> None:
    (folder / file).write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message) as caught:
        read_sentence_vectors(folder)
    assert file in str(caught.value)
