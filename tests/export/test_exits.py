"""A bundle that answers texts after fewer layers gives torch's answers, whatever the batch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from albert_serve.bundle.manifest import Bundle, EarlyExitDefaults, Precision, read_manifest
from albert_serve.bundle.weights import exit_shapes, read_header
from albert_serve.runtime.encoders import CpuEncoder, PaddedBatch
from albert_serve.runtime.engine import Engine
from albert_serve.runtime.ort import encoder_options, open_session
from albert_serve.settings import RuntimeOptions
from albert_serve.tasks.base import EarlyExit, EncoderInput, Logits
from export.__main__ import main
from export.bundle import LayerOptions, export_bundle
from export.source import read_source, with_early_exit
from tests.export.exporting import TINY, ragged, randomize, run_encoder, write_checkpoint
from training.conversion.shipped import restore_weights
from training.evaluation.early_exit import layers_used
from training.model.albert import ModelInputs
from training.model.checkpoint import load_checkpoint, read_config, save_checkpoint
from training.model.heads import AlbertForTasks

CPU = RuntimeOptions(device="cpu", num_threads=1)


@pytest.fixture(scope="module")
def checkpoint(real_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small checkpoint with a classifier after each of its four layers."""
    config = load_checkpoint(real_checkpoint).config
    sizes = load_checkpoint(real_checkpoint).tasks
    model = AlbertForTasks(config, sizes, has_exits=True)
    randomize(model)
    folder = tmp_path_factory.mktemp("adaptive") / "checkpoint"
    labels = {"id2label": {"0": "negative", "1": "positive"}}
    save_checkpoint(model.eval(), folder, tokenizer_from=real_checkpoint, extra_config=labels)
    return folder


@pytest.fixture(scope="module")
def bundle(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return export_bundle(checkpoint, tmp_path_factory.mktemp("bundles") / "adaptive").bundle


def inputs_of(seed: int = 0, count: int = 24) -> list[EncoderInput]:
    """Texts of other tasks and texts to classify, some of them with limits of layers."""
    rng = np.random.default_rng(seed)
    tasks = ("text-classification", "fill-mask", "question-answering", "text-classification")
    inputs = []
    for number in range(count):
        size = int(rng.integers(3, 60))
        task = tasks[number % 4]
        early_exit, rows = None, [0, 2]
        if task == "text-classification":
            rows = [0]
            if number % 3:
                most, patience = int(rng.integers(1, 5)), int(rng.integers(1, 4))
                early_exit = EarlyExit(max_layers=most, patience=patience)
        ids = rng.integers(5, 600, size).tolist()
        given = EncoderInput(ids=ids, types=[0] * size, task=task, rows=rows, early_exit=early_exit)
        inputs.append(given)
    return inputs


@torch.inference_mode()
def expected(model: AlbertForTasks, item: EncoderInput) -> Logits:
    """The logits of torch, after the layers that a text has by the rule of patience."""
    batch = ModelInputs(ids=torch.tensor([item.ids]), types=torch.tensor([item.types]))
    states = list(model.albert.states(batch))[1:]
    rows = item.rows
    assert rows is not None
    if item.early_exit is None:
        last: Logits = model.logits(item.task, states[-1][0, rows]).numpy()
        return last
    logits_LK = model.exit_logits(torch.stack([state[0, :1] for state in states]))[:, 0].numpy()
    used = layers_used(logits_LK[None], item.early_exit.patience)[0]
    return logits_LK[[min(used, item.early_exit.max_layers) - 1]]


def assert_all_close(got: Sequence[Logits], expected_logits: Sequence[Logits], atol: float) -> None:
    for one, other in zip(got, expected_logits, strict=True):
        np.testing.assert_allclose(one, other, atol=atol)


def test_answers_are_torchs_alone_and_in_any_batch(checkpoint: Path, bundle: Bundle) -> None:
    engine = Engine.open(bundle, CPU)
    inputs = inputs_of()
    assert {item.early_exit is None for item in inputs} == {True, False}
    expected_logits = [expected(load_checkpoint(checkpoint).eval(), item) for item in inputs]

    assert_all_close(engine.run_batch(inputs), expected_logits, 1e-4)
    assert_all_close(engine.run(inputs), expected_logits, 1e-4)
    assert_all_close([engine.run_batch([item])[0] for item in inputs], expected_logits, 1e-4)


@pytest.mark.parametrize("precision", ["int8", "fp16"])
def test_lower_precisions_settle_as_their_own_weights_do(
    checkpoint: Path, tmp_path: Path, precision: Precision
) -> None:
    """The same text alone and among others; in fp16, as torch with the bundle's weights."""
    bundle = export_bundle(checkpoint, tmp_path / "bundle", precision=precision).bundle
    stored = read_header(bundle.weights_file)
    assert all(stored[name].dtype == "F32" for name in exit_shapes(bundle.config, 2))
    engine = Engine.open(bundle, CPU)
    inputs = inputs_of(seed=1)

    together = engine.run_batch(inputs)

    assert_all_close([engine.run_batch([item])[0] for item in inputs], together, 1e-5)
    if precision == "fp16":
        restore_weights(bundle.weights_file, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
        own = load_checkpoint(tmp_path).eval()
        assert_all_close(together, [expected(own, item) for item in inputs], 1e-4)


def test_settled_texts_leave_the_batch(bundle: Bundle) -> None:
    """Hidden states are those of the others; with none left the Loop ends."""
    encoder = CpuEncoder(session=open_session(bundle.encoder_file, encoder_options(CPU)))
    ids = np.random.default_rng(0).integers(5, 600, (3, 9))
    batch = PaddedBatch(ids=ids, types=np.zeros_like(ids), lengths=np.array([9, 4, 7]))
    whole = encoder.run(batch).numpy()

    some = encoder.run_with_exits(batch, [None, EarlyExit(max_layers=2, patience=4), None])
    none = encoder.run_with_exits(batch, [EarlyExit(max_layers=n, patience=4) for n in (1, 3, 2)])

    assert whole.shape == (3, 9, TINY.hidden_size)
    assert some.layers.tolist() == [4, 2, 4]
    got = some.hidden.numpy()
    np.testing.assert_allclose(got[0], whole[0], atol=1e-5)
    np.testing.assert_allclose(got[1, :7], whole[2, :7], atol=1e-5)
    assert none.layers.tolist() == [1, 3, 2]
    assert none.hidden.shape() == [0, 9, TINY.hidden_size]


@pytest.mark.parametrize("place", [0, 16, 32])
def test_a_text_with_a_limit_stands_anywhere_in_a_batch(bundle: Bundle, place: int) -> None:
    encoder = CpuEncoder(session=open_session(bundle.encoder_file, encoder_options(CPU)))
    ids = np.random.default_rng(0).integers(5, 600, (33, 6))
    batch = PaddedBatch(ids=ids, types=np.zeros_like(ids), lengths=np.full(33, 6))
    early_exits: list[EarlyExit | None] = [None] * 33
    early_exits[place] = EarlyExit(max_layers=1, patience=4)
    layers = encoder.run_with_exits(batch, early_exits).layers
    assert layers.tolist() == [1 if row == place else 4 for row in range(33)]


FIGURES = {
    "text_classification_task": "SST-2",
    "text_classification_accuracy": 0.9,
    "text_classification_by_layer": [{"layers": 1, "accuracy": 0.1}],
    "masked_accuracy": 0.4,
}


@pytest.mark.parametrize(
    ("max_layers", "patience", "is_early"),
    [(None, None, False), (4, 9, False), (3, None, True), (None, 2, True)],
)
def test_figures_after_the_last_layer_are_those_of_a_bundle_that_answers_there(
    checkpoint: Path, tmp_path: Path, max_layers: int | None, patience: int | None, is_early: bool
) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(checkpoint, folder)
    (folder / "evaluation.json").write_text(json.dumps(FIGURES))
    evaluation = with_early_exit(read_source(folder), max_layers, patience).evaluation
    left_out = {"text_classification_accuracy"} if is_early else set()
    assert evaluation == {name: FIGURES[name] for name in FIGURES.keys() - left_out}


def test_a_bundle_that_is_exported_again_has_no_figures_of_its_early_exits(
    checkpoint: Path, tmp_path: Path
) -> None:
    shutil.copytree(checkpoint, tmp_path / "checkpoint")
    (tmp_path / "checkpoint/evaluation.json").write_text(json.dumps(FIGURES))
    first = export_bundle(
        tmp_path / "checkpoint", tmp_path / "first", layers=LayerOptions(patience=2)
    ).bundle
    assert first.manifest.tasks["text-classification"].adaptive_depth == EarlyExitDefaults(
        patience=2
    )
    again = export_bundle(first.folder, tmp_path / "again").bundle
    assert again.manifest.tasks["text-classification"].adaptive_depth == EarlyExitDefaults()
    assert "text_classification_accuracy" not in again.manifest.evaluation
    assert again.manifest.evaluation["masked_accuracy"] == 0.4


def test_fewer_layers_of_a_plain_checkpoint(tmp_path: Path) -> None:
    """The weights stay the checkpoint's own file, and figures of all layers are left out."""
    model = write_checkpoint(tmp_path / "checkpoint", TINY, ("fill-mask", "text-classification"))
    (tmp_path / "checkpoint/evaluation.json").write_text('{"masked_accuracy": 0.5}')
    (tmp_path / "checkpoint/training.json").write_text('{"steps": 3}')
    target = tmp_path / "bundle"

    assert main([str(tmp_path / "checkpoint"), str(target), "--layers", "2", "--no-quality"]) == 0

    manifest = read_manifest(target)
    assert manifest.config["num_hidden_layers"] == 2
    assert read_config(target)["num_hidden_layers"] == 2
    assert manifest.evaluation == {}
    assert manifest.provenance["training"] == {"steps": 3}
    assert manifest.tasks["text-classification"].adaptive_depth is None
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


def test_fewer_layers_of_an_adaptive_one_have_its_classifier(
    checkpoint: Path, tmp_path: Path
) -> None:
    cut = export_bundle(checkpoint, tmp_path / "two", layers=LayerOptions(layers=2)).bundle
    one = export_bundle(checkpoint, tmp_path / "one", layers=LayerOptions(layers=1)).bundle
    assert cut.manifest.tasks["text-classification"].adaptive_depth == EarlyExitDefaults()
    assert one.manifest.tasks["text-classification"].adaptive_depth is None
    model = load_checkpoint(checkpoint).eval()
    texts = [item for item in inputs_of() if item.task == "text-classification"]
    for bundle, layers in ((cut, 2), (one, 1)):
        deep = EarlyExit(max_layers=layers, patience=4)
        expected_logits = [expected(model, replace(item, early_exit=deep)) for item in texts]
        plain = [replace(item, early_exit=None) for item in texts]
        assert_all_close(Engine.open(bundle, CPU).run(plain), expected_logits, 1e-4)
