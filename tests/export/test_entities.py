"""A checkpoint that classifies tokens as a bundle: labels, and the cost of int8 in entity F1."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from export.__main__ import main
from tests.export.exporting import export_bundle, randomize
from training.model.checkpoint import load_checkpoint, save_checkpoint

LABELS = ["O", "B-PER", "I-PER"]
TASK: Final = "token-classification"


@pytest.fixture(scope="module")
def checkpoint(real_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = load_checkpoint(real_checkpoint, {TASK: 3})
    randomize(model)
    folder = tmp_path_factory.mktemp("tokens") / "checkpoint"
    labels = {"id2label": {str(number): name for number, name in enumerate(LABELS)}}
    save_checkpoint(model.eval(), folder, tokenizer_from=real_checkpoint, extra_config=labels)
    return folder


def test_a_bundle_has_the_labels_and_its_entity_f1(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "test.conll"
    file.write_text("Ada B-PER\nKing I-PER\ncame O\n\nShe O\nleft O\n" * 20)
    command = [str(checkpoint), str(tmp_path / "int8"), "--precision", "int8", "--force"]
    assert main([*command, "--token-classification", str(file)]) == 0
    bundle = export_bundle(checkpoint, tmp_path / "fp32").bundle
    assert bundle.manifest.heads[TASK].labels == LABELS
    with_data = {"token_classification": (file,), "quality": True}
    exported = export_bundle(checkpoint, tmp_path / "data", **with_data).bundle.manifest
    quality = exported.heads[TASK].quality
    assert quality is not None
    assert (quality.metric, quality.data) == ("entity F1", ["test.conll"])
    assert quality.bundle == quality.torch
