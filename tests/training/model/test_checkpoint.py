"""Checkpoints are exchanged with `transformers` without change, and bad checkpoints rejected."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from albert_serve.config import Sharing
from tests.training.support import (
    HF_CLASSES,
    JOINT_TASKS,
    TINY,
    assert_close,
    each_class,
    each_sharing,
    file_contents,
    hf_load,
    hf_logits,
    hf_model,
    our_logits,
    our_model,
    ragged,
)
from training.model.checkpoint import CheckpointError, find_tasks, load_checkpoint, save_checkpoint
from training.model.hf_names import parameters
from training.model.provenance import read_quality

pytestmark = pytest.mark.process

Damage = Callable[[Path], object]

GROUPED = replace(TINY, num_groups=2, num_inner_layers=2)


@each_class
@torch.no_grad()
def test_transformers_loads_our_checkpoint_and_we_load_theirs(
    tmp_path: Path, class_name: str
) -> None:
    model = our_model(GROUPED, HF_CLASSES[class_name])
    save_checkpoint(model, tmp_path / "ours")
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert config["architectures"] == [class_name]
    assert (tmp_path / "ours" / "model.safetensors").stat().st_mode & 0o777 == 0o644
    hf_copy = hf_load(class_name, tmp_path / "ours")
    hf_copy.save_pretrained(tmp_path / "theirs")
    loaded = load_checkpoint(tmp_path / "theirs").eval()
    assert tuple(loaded.tasks) == HF_CLASSES[class_name]
    assert loaded.config == GROUPED
    expected = hf_logits(hf_copy.double(), ragged())
    for ours in (model, loaded):
        assert_close(our_logits(ours.double(), ragged()), expected)


@torch.no_grad()
def test_each_class_of_transformers_loads_its_head_from_a_file_of_several(tmp_path: Path) -> None:
    """`transformers` also uses the number of labels for sentence order and spans.

    Its sentence-order head therefore has one output per label. Only the first two count.
    """
    ours = our_model(TINY, JOINT_TASKS)
    save_checkpoint(ours, tmp_path)
    logits = our_logits(ours, ragged())
    for class_name in HF_CLASSES:
        spans = {"num_labels": 2} if class_name == "AlbertForQuestionAnswering" else {}
        if {*HF_CLASSES[class_name]} <= {*JOINT_TASKS}:
            expected = hf_logits(hf_load(class_name, tmp_path, **spans), ragged())
            if (order := expected.get("sentence-order")) is not None:
                assert order.softmax(-1)[:, 2:].max() == 0
                expected["sentence-order"] = order[:, :2]
            assert_close({task: logits[task] for task in expected}, expected, limit=1e-4)
    assert_close(our_logits(load_checkpoint(tmp_path).eval(), ragged()), logits)


@each_sharing
@torch.no_grad()
def test_every_sharing_is_stored_once_and_loads_unchanged(tmp_path: Path, sharing: Sharing) -> None:
    """`transformers` rejects checkpoints of `attention` and `ffn`, and loads the others."""
    config = replace(GROUPED, sharing=sharing)
    model = our_model(config, ("fill-mask", "sentence-order"))
    save_checkpoint(model, tmp_path)
    loaded = load_checkpoint(tmp_path)
    num_groups = 1 if sharing == "none" else config.num_groups
    assert loaded.config == replace(config, num_groups=num_groups)
    assert loaded.tasks == model.tasks
    tensors = load_file(tmp_path / "model.safetensors")
    expected = parameters(model)
    assert tensors.keys() == expected.keys() == parameters(loaded).keys()
    assert sum(t.numel() for t in tensors.values()) == sum(p.numel() for p in model.parameters())
    for name, parameter in parameters(loaded).items():
        assert torch.equal(parameter, expected[name])
    if sharing in ("all", "none"):
        hf_copy = hf_load("AlbertForPreTraining", tmp_path).double()
        assert_close(our_logits(model.double(), ragged()), hf_logits(hf_copy, ragged()))
    else:
        with pytest.raises(ValueError, match=f"none for albert_sharing={sharing}"):
            hf_load("AutoModel", tmp_path)


@torch.no_grad()
def test_a_backbone_of_transformers_without_heads_is_loaded(tmp_path: Path) -> None:
    theirs = hf_model(TINY, "AlbertModel")
    theirs.save_pretrained(tmp_path)
    ours = load_checkpoint(tmp_path, {"sentence-order": 2})
    batch = ragged((16, 16))
    expected = theirs(input_ids=batch.ids, token_type_ids=batch.types)[0]
    assert_close({"hidden": ours(batch)}, {"hidden": expected}, limit=1e-4)
    assert ours.pooler is not None
    assert torch.equal(ours.pooler.dense.weight, theirs.pooler.weight)


def test_heads_that_the_file_lacks_or_of_another_size_are_initialised(tmp_path: Path) -> None:
    model = our_model(TINY, ("fill-mask", "text-classification"))
    save_checkpoint(model, tmp_path)
    tasks = {"text-classification": 5, "question-answering": 2, "fill-mask": 50}
    loaded, saved = parameters(load_checkpoint(tmp_path, tasks)), parameters(model)
    for name in loaded.keys() & saved.keys() - {"classifier.weight", "classifier.bias"}:
        assert torch.equal(loaded[name], saved[name]), name
    assert loaded["classifier.weight"].shape == (5, 24)
    for name in ("classifier", "qa_outputs"):
        assert not loaded[f"{name}.bias"].any()
        assert 0 < loaded[f"{name}.weight"].abs().max() <= 0.04 + 1e-6


@pytest.mark.parametrize("file", ["evaluation.json", "manifest.json"])
def test_the_quality_is_read_from_a_checkpoint_or_a_bundle(tmp_path: Path, file: str) -> None:
    metrics = {"text_classification_accuracy": 0.75, "text_classification_texts": 8}
    content = metrics if file == "evaluation.json" else {"evaluation": metrics}
    (tmp_path / file).write_text(json.dumps(content))
    quality = read_quality(tmp_path)["text-classification"]
    assert (quality["metric"], quality["percent"], quality["count"]) == ("accuracy", 75, 8)


def test_the_architecture_distinguishes_multiple_choice_from_regression(tmp_path: Path) -> None:
    shapes, names = {"classifier.bias": (1,)}, ["AlbertForMultipleChoice"]
    assert find_tasks(shapes) == {"text-classification": 1}
    assert find_tasks(shapes, names) == {"multiple-choice": 1}
    assert find_tasks({"classifier.bias": (2,)}, names) == {"text-classification": 2}
    save_checkpoint(our_model(TINY, ("fill-mask", "multiple-choice")), tmp_path)
    assert load_checkpoint(tmp_path).tasks == {"fill-mask": 50, "multiple-choice": 1}


def change_config(**changes: Any) -> Damage:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


@torch.no_grad()
def test_the_config_determines_how_often_a_shared_layer_is_applied(tmp_path: Path) -> None:
    save_checkpoint(our_model(TINY, ("fill-mask", "sentence-order")), tmp_path)
    change_config(num_hidden_layers=6)(tmp_path)
    ours, theirs = load_checkpoint(tmp_path).eval(), hf_load("AlbertForPreTraining", tmp_path)
    assert ours.config.num_layers == 6
    assert_close(our_logits(ours.double(), ragged()), hf_logits(theirs.double(), ragged()))


def change_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def rewrite(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return rewrite


LAYER = "albert.encoder.albert_layer_groups.{}.albert_layers.0.attention.query.bias"
NORM = "albert.embeddings.LayerNorm.bias"
EXTRA = {LAYER.format(1): torch.zeros(1)}


CASES: dict[str, tuple[Damage, str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), r"config\.json cannot be read"),
    "other model": (change_config(model_type="bert"), "config.json of .*: model_type is 'bert'"),
    "truncated": (lambda f: os.truncate(f / "model.safetensors", 5000), "s cannot be read: .*"),
    "far wider": (change_config(hidden_size=12_000_000), r"shape \(24, \d+\), but .*\(12000000"),
    "other heads": (change_config(architectures=["Reranker"]), "architecture Reranker in"),
    "no list": (change_config(architectures=[7]), r"architectures of .* is \[7\], not a list"),
    "infinite": (change_weights(lambda w: w[NORM][1].fill_(-math.inf)), "Norm.bias contains NaN"),
    "no query": (change_weights(lambda w: w.pop(LAYER.format(0))), "has no .*query.bias"),
    "extra layer": (change_weights(lambda w: w.update(EXTRA)), "has albert.*groups.1.*, which its"),
    "half a head": (change_weights(lambda w: w.pop("predictions.dense.weight")), "has no predic"),
}


@pytest.mark.parametrize(("damage", "message"), CASES.values(), ids=CASES)
def test_a_bad_checkpoint_is_rejected(tmp_path: Path, damage: Damage, message: str) -> None:
    save_checkpoint(our_model(TINY, ("fill-mask", "sentence-order")), tmp_path)
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path)


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    model = our_model(TINY, ("fill-mask",))
    save_checkpoint(model, tmp_path)
    files = file_contents(tmp_path)
    with torch.no_grad():
        model.albert.encoder.ffns[0].get_parameter("up.weight")[3, 4] = math.inf
    with pytest.raises(CheckpointError, match=r"not saved: .*ffn.weight contain NaN"):
        save_checkpoint(model, tmp_path)
    assert file_contents(tmp_path) == files
