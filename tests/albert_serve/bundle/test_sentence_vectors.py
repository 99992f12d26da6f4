"""The files by which `sentence-transformers` knows the form of a sentence's vector."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from albert_serve.bundle.sentence_vectors import (
    SentenceVectors,
    read_sentence_vectors,
    write_sentence_vectors,
)
from albert_serve.errors import ConfigError


def _write(file: Path, content: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint's folder, as far as these files go."""
    _write(tmp_path / "config.json", {"max_position_embeddings": 512})
    write_sentence_vectors(SentenceVectors(), tmp_path, hidden_size=8)
    return tmp_path


def _modules(*kinds: str) -> list[dict[str, Any]]:
    return [
        {"path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]


def test_a_cross_encoder_has_no_vectors_of_sentences(folder: Path) -> None:
    _write(folder / "modules.json", _modules("Transformer"))

    assert read_sentence_vectors(folder) is None

    settings = {"prompts": {"query": "query: "}, "default_prompt_name": "query"}
    _write(folder / "config_sentence_transformers.json", settings)
    with pytest.raises(ConfigError, match="a prompt before every text"):
        read_sentence_vectors(folder)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("modules.json", _modules("Transformer", "Pooling", "Dense"), "Pooling, Dense;"),
        ("modules.json", _modules("Transformer", "Normalize", "Pooling"), "Normalize, Pooling"),
        ("modules.json", [{"path": "../other", "type": "x.Transformer"}], "path"),
        ("modules.json", '[{"path": ', "modules.json cannot be used"),
        ("modules.json", {"path": ""}, "valid array"),
        ("modules.json", "[" + " " * (1 << 20) + "]", "more than 1048576 bytes"),
        ("1_Pooling/config.json", {"pooling_mode": ["mean", "max"]}, "mean, cls and max"),
        ("1_Pooling/config.json", {"pooling_mode_mean_sqrt_len_tokens": True}, "mean_sqrt_len"),
        ("1_Pooling/config.json", [], "cannot be used"),
        ("sentence_bert_config.json", {"max_seq_length": "long"}, "max_seq_length"),
        ("sentence_bert_config.json", {"max_seq_length": 2}, "max_seq_length"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "set it to false"),
        (
            "config_sentence_transformers.json",
            {"prompts": {"query": "query: "}, "default_prompt_name": "query"},
            "a prompt before every text",
        ),
        ("config_sentence_transformers.json", {"truncate_dim": 8}, "has truncate_dim 8,"),
        ("config_setfit.json", {"labels": ["dry", "wet"]}, "Copy the folder without"),
        ("model_head.pkl", "a pickle file", "Copy the folder without"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(
    folder: Path, file: str, content: Any, message: str
) -> None:
    _write(folder / file, content)

    with pytest.raises(ConfigError, match=message) as refused:
        read_sentence_vectors(folder)
    assert file in str(refused.value)
