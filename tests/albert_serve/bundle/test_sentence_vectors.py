"""The form of embeddings in the files of `sentence-transformers`."""

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


PROMPT = {"prompts": {"query": "query: "}, "default_prompt_name": "query"}


def test_a_cross_encoder_has_no_embeddings(folder: Path) -> None:
    _write(folder / "modules.json", _modules("Transformer"))
    assert read_sentence_vectors(folder) is None


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"sentence_bert_config.json": {"max_seq_length": 3}}, 3),
        ({"sentence_bert_config.json": {"max_seq_length": 511}}, 511),
        ({"sentence_bert_config.json": {"max_seq_length": 512}}, None),
        ({"tokenizer_config.json": {"model_max_length": 8}}, 8),
        (
            {
                "sentence_bert_config.json": {"max_seq_length": 9},
                "tokenizer_config.json": {"model_max_length": 8},
            },
            9,
        ),
    ],
)
def test_a_text_has_at_most_the_tokens_of_the_files_or_all_positions(
    folder: Path, limits: dict[str, Any], expected: int | None
) -> None:
    for file, content in limits.items():
        _write(folder / file, content)
    assert read_sentence_vectors(folder) == SentenceVectors(max_length=expected)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("modules.json", _modules("Transformer", "Pooling", "Dense"), "Pooling, Dense;"),
        ("modules.json", _modules("Transformer", "Normalize", "Pooling"), "Normalize, Pooling"),
        ("modules.json", [{"path": "../other", "type": "x.Transformer"}], "path"),
        ("modules.json", {"path": ""}, "valid array"),
        ("modules.json", "[" + " " * ((1 << 20) - 1) + "]", "more than 1048576 bytes"),
        ("1_Pooling/config.json", {"pooling_mode": ["mean", "max"]}, "mean.*, cls"),
        ("1_Pooling/config.json", {"pooling_mode_mean_sqrt_len_tokens": True}, "mean_sqrt_len"),
        ("sentence_bert_config.json", {"max_seq_length": 2}, "max_seq_length"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "Set it to false"),
        ("config_sentence_transformers.json", PROMPT, "a prompt before every text"),
        ("config_sentence_transformers.json", {"truncate_dim": 8}, "has truncate_dim 8,"),
        ("config_setfit.json", {"labels": ["dry", "wet"]}, "copy the folder without"),
        ("model_head.pkl", "a pickle file", "copy the folder without"),
    ],
)
def test_a_form_that_is_not_supported_is_rejected_with_the_file(
    folder: Path, file: str, content: Any, message: str
) -> None:
    _write(folder / file, content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_sentence_vectors(folder)
    assert file in str(caught.value)
