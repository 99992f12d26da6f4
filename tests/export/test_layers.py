"""`--layers`: a model whose layers share all weights applies fewer of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from albert_serve.bundle.manifest import read_manifest
from albert_serve.client import AlbertClient
from export.__main__ import main as export
from tests.export.exporting import TINY, ragged, run_encoder, write_checkpoint
from training.commands.convert import main as convert
from training.commands.finetune import main as finetune
from training.model.albert import ModelInputs
from training.model.checkpoint import CheckpointError, load_checkpoint, read_config
from training.model.resizing import with_layers

pytestmark = pytest.mark.process

MOODS = ("glad", "great", "sad", "bad")


def test_a_model_finetuned_with_fewer_layers_is_exported_and_answers(
    real_checkpoint: Path, tmp_path: Path
) -> None:
    texts = tmp_path / "moods.csv"
    rows = [f"it was {word} {n},{MOODS.index(word) < 2}" for word in MOODS for n in range(6)]
    texts.write_text("\n".join(["text,label", *rows]))
    run, bundle = tmp_path / "run", tmp_path / "bundle"
    start = ["--initialize-from", str(real_checkpoint), "--output", str(run), "--layers", "3"]
    data = ["--text-classification", str(texts), "--steps", "2", "--length", "32"]

    assert finetune([*start, *data, "--no-compile"]) == 0
    assert export([str(run / "checkpoint"), str(bundle), "--no-quality"]) == 0

    assert read_config(run / "checkpoint")["num_hidden_layers"] == 3
    classify: Any = transformers.pipeline(
        "text-classification", str(run / "checkpoint"), top_k=None
    )
    [labels] = classify(["it was sad"])
    expected_scores = {label["label"]: label["score"] for label in labels}
    with AlbertClient.local(bundle, num_threads=1) as albert:
        answer = albert.text_classification("it was sad")
    scores = {label.label: label.score for label in answer}
    assert scores == pytest.approx(expected_scores, abs=1e-5)


def test_an_exported_bundle_has_the_first_layers_and_the_checkpoint_s_file(tmp_path: Path) -> None:
    """Figures of all layers are left out."""
    model = write_checkpoint(tmp_path / "checkpoint", TINY, ("fill-mask", "text-classification"))
    (tmp_path / "checkpoint/evaluation.json").write_text('{"masked_accuracy": 0.5}')
    (tmp_path / "checkpoint/training.json").write_text('{"steps": 3}')
    target = tmp_path / "bundle"

    assert export([str(tmp_path / "checkpoint"), str(target), "--layers", "2", "--no-quality"]) == 0

    manifest = read_manifest(target)
    assert manifest.config["num_hidden_layers"] == 2
    assert read_config(target)["num_hidden_layers"] == 2
    assert manifest.evaluation == {}
    assert manifest.provenance["training"] == {"steps": 3}
    weights = (tmp_path / "checkpoint/model.safetensors").read_bytes()
    assert (target / "model.safetensors").read_bytes() == weights
    sample = ragged(TINY)
    batch = ModelInputs(
        ids=torch.from_numpy(sample.ids),
        types=torch.from_numpy(sample.types),
        lengths=torch.from_numpy(sample.lengths),
    )
    with torch.inference_mode():
        expected_logits = list(model.albert.states(batch))[2].numpy()
    got = run_encoder(target, sample)
    np.testing.assert_allclose(got[sample.is_real], expected_logits[sample.is_real], atol=1e-5)


def test_a_converted_checkpoint_applies_as_many_in_transformers(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "checkpoint", TINY, ("fill-mask",))
    target = tmp_path / "converted"

    assert convert([str(tmp_path / "checkpoint"), str(target), "--layers", "2"]) == 0

    ids = torch.arange(5, 12)[None]
    with torch.inference_mode():
        got = transformers.AlbertModel.from_pretrained(target)(ids).last_hidden_state
        states = list(model.eval().albert.states(ModelInputs(ids=ids, types=torch.zeros_like(ids))))
    torch.testing.assert_close(got, states[2], atol=1e-5, rtol=0)


@pytest.mark.parametrize("num_layers", [0, 5])
def test_a_model_has_no_more_layers_than_its_checkpoint(tmp_path: Path, num_layers: int) -> None:
    write_checkpoint(tmp_path, TINY, ("fill-mask",))
    with pytest.raises(CheckpointError, match="has 1 to 4"), with_layers(tmp_path, num_layers):
        pass


def test_layers_with_weights_of_their_own_cannot_be_left_out(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, replace(TINY, num_groups=2), ("fill-mask",))
    message = "only a model whose layers share all"
    with pytest.raises(CheckpointError, match=message), with_layers(tmp_path, 2):
        pass
    assert load_checkpoint(tmp_path).config.num_layers == TINY.num_layers
