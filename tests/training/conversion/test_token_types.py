"""Token types of pairs: those that the folder's own tokenizer gives."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers

from albert_serve.tokenizer import AlbertTokenizer
from tests.training.support import TINY, hf_model
from training.conversion.source import open_checkpoint

PAIR = ("It rained all night.", "The match was put off.")


@pytest.mark.parametrize(
    ("settings", "version", "last_type"),
    [
        ({"tokenizer_class": "AlbertTokenizer"}, transformers.__version__, 0),
        ({"tokenizer_class": "AlbertTokenizer"}, "4.57.0", 1),
        ({"tokenizer_class": "BertTokenizer"}, "5.0.0", 1),
        ({"model_input_names": ["input_ids", "attention_mask"]}, "4.57.0", 0),
        ({"model_input_names": ["input_ids", "token_type_ids"]}, "5.0.0", 1),
    ],
)
def test_pairs_have_the_types_of_the_folders_settings(
    vocab_dir: Path, tmp_path: Path, settings: dict[str, Any], version: str, last_type: int
) -> None:
    folder = tmp_path / "checkpoint"
    hf_model(TINY, "AlbertForSequenceClassification").save_pretrained(folder)
    shutil.copyfile(vocab_dir / "tokenizer.json", folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "transformers_version": version}))

    with open_checkpoint(folder) as opened:
        encoding = AlbertTokenizer.from_file(opened.folder / "tokenizer.json").encode(*PAIR)
    expected = AlbertTokenizer.from_file(folder / "tokenizer.json").encode(*PAIR)

    assert encoding.types[-1] == last_type
    assert encoding.types == [last_type * each for each in expected.types]
    assert encoding.ids == expected.ids
