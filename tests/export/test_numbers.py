"""The graphs compute the same numbers as torch and `transformers`, from a separate weights file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from albert_serve.bundle.manifest import Precision
from albert_serve.bundle.weights import read_header
from albert_serve.config import AlbertConfig
from albert_serve.runtime.engine import Engine
from albert_serve.tasks.base import EncoderInput
from albert_serve.tokenizer import AlbertTokenizer
from export.graph import CUDA_VERSION, Compute
from export.models import build_encoder
from tests.export import exporting
from tests.export.exporting import TINY, export_bundle, external_tensors, run_encoder
from tests.training.support import TOKEN_TASKS, hf_logits, is_real, ragged, randomize
from training.conversion.weight_files import restore_weights

pytestmark = pytest.mark.process

# Sequences of one token to all positions.
BATCH: Final = ragged((1, 7, 2, TINY.max_positions))
REAL: Final = is_real(BATCH).numpy()


@pytest.mark.parametrize(
    ("class_name", "activation"),
    [
        *(("AlbertModel", "gelu_new"), ("AlbertForPreTraining", "gelu_new")),
        *(("AlbertForMaskedLM", "gelu_new"), ("AlbertForMaskedLM", "gelu")),
        ("AlbertForSequenceClassification", "gelu_new"),
        *(("AlbertForQuestionAnswering", "gelu"), ("AlbertForTokenClassification", "gelu_new")),
    ],
)
def test_logits_are_those_of_transformers(tmp_path: Path, class_name: str, activation: str) -> None:
    checkpoint = tmp_path / "checkpoint"
    # In `transformers`, the head for sentence order has an output for each label. Ours has two.
    labels = ["bad", "middling", "good"][: 2 if "Question" in class_name else 3]
    config = transformers.AlbertConfig(
        **{**TINY.to_hf(), "hidden_act": activation, "id2label": dict(enumerate(labels))}
    )
    model = getattr(transformers, class_name)(config).eval()
    randomize(model, seed=0)
    model.save_pretrained(checkpoint)
    exporting.write_tokenizer(checkpoint)
    tensors = load_file(checkpoint / "model.safetensors")
    if class_name == "AlbertForMaskedLM":  # old versions store the tied matrix twice
        tied_matrix = tensors["albert.embeddings.word_embeddings.weight"]
        stored = {**tensors, "predictions.decoder.weight": tied_matrix}
        save_file(stored, checkpoint / "model.safetensors", {"format": "pt"})

    exported = export_bundle(checkpoint, tmp_path / "bundle")

    hidden = run_encoder(tmp_path / "bundle", BATCH)
    if class_name == "AlbertModel":
        inputs = {"input_ids": BATCH.ids, "token_type_ids": BATCH.types}
        with torch.inference_mode():
            outputs = model(**inputs, attention_mask=is_real(BATCH).long())
        np.testing.assert_allclose(hidden[REAL], outputs[0].numpy()[REAL], atol=1e-5)
        return
    assert exported.unused == []
    assert load_file(tmp_path / "bundle/model.safetensors").keys() == tensors.keys()
    with torch.inference_mode():
        expected_logits = hf_logits(model, BATCH)
    for task, expected in expected_logits.items():
        rows = hidden[REAL] if task in TOKEN_TASKS else hidden[:, 0]
        logits = exporting.run_head(tmp_path / "bundle", task, rows)
        expected = expected[:, :2] if task == "sentence-order" else expected
        np.testing.assert_allclose(logits, expected.numpy(), atol=1e-5)


def test_an_fp32_bundle_is_read_by_transformers(real_checkpoint: Path, tmp_path: Path) -> None:
    bundle = export_bundle(real_checkpoint, tmp_path / "bundle").bundle
    text = "the [MASK] of the city"
    tokenizer = transformers.AutoTokenizer.from_pretrained(bundle.folder)
    model = transformers.AutoModelForMaskedLM.from_pretrained(bundle.folder).eval()
    encoded = tokenizer(text, return_tensors="pt")
    with torch.inference_mode():
        logits = model(**encoded).logits[0]

    ids = AlbertTokenizer.from_file(bundle.tokenizer_file).encode(text).ids
    assert ids == encoded["input_ids"][0].tolist()
    mask = ids.index(tokenizer.mask_token_id)
    masked = EncoderInput(ids=ids, types=[0] * len(ids), task="fill-mask", rows=[mask])
    (our_logits,) = Engine.open(bundle).run([masked])
    np.testing.assert_allclose(our_logits[0], logits[mask].numpy(), atol=1e-4)


CONFIGS: Final = {
    "uneven-groups": replace(TINY, num_groups=3),
    "groups-of-inner-layers": replace(TINY, num_groups=2, num_inner_layers=2),
    "sharing-attention": replace(TINY, sharing="attention"),
    "sharing-ffn-inner-layers": replace(TINY, sharing="ffn", num_inner_layers=2),
    "one-layer": replace(TINY, num_layers=1, embedding_size=24),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_hidden_states_are_torchs_for_any_padding(config: AlbertConfig, tmp_path: Path) -> None:
    model = exporting.write_checkpoint(tmp_path / "checkpoint", config, tasks=())
    export_bundle(tmp_path / "checkpoint", tmp_path / "bundle")
    with torch.inference_mode():
        expected = model(BATCH).numpy()

    hidden = run_encoder(tmp_path / "bundle", BATCH)

    assert hidden.shape == expected.shape
    np.testing.assert_allclose(hidden[REAL], expected[REAL], atol=1e-5)
    real = is_real(BATCH)
    other_padding = replace(
        BATCH, ids=torch.where(real, BATCH.ids, 7), types=torch.where(real, BATCH.types, 1)
    )
    padded_hidden = run_encoder(tmp_path / "bundle", other_padding)
    np.testing.assert_array_equal(padded_hidden[REAL], hidden[REAL])


@pytest.mark.parametrize(
    ("precision", "compute", "tolerance"),
    [("fp32", "fp16", 0.004), ("fp16", "fp32", 2e-6), ("int8", "fp32", 2e-6)],
)
def test_the_cuda_graph_computes_the_same_hidden_states(
    precision: Precision, compute: Compute, tolerance: float, tmp_path: Path
) -> None:
    """The graph for CUDA reads the same weights. Its operators also run on the CPU."""
    config = replace(TINY, num_groups=2)
    exporting.write_checkpoint(tmp_path / "checkpoint", config, tasks=())
    exported = export_bundle(tmp_path / "checkpoint", tmp_path / "b", precision=precision)
    folder = exported.bundle.folder
    stored = read_header(folder / "model.safetensors")
    version = replace(CUDA_VERSION, compute=compute)
    onnx.save(build_encoder(config, stored, version), folder / "c.onnx")
    restored = tmp_path / "restored"
    restored.mkdir()
    restore_weights(folder / "model.safetensors", restored / "model.safetensors")
    plain = build_encoder(config, read_header(restored / "model.safetensors"))
    onnx.save(plain, restored / "encoder.onnx")
    hidden, expected = run_encoder(folder, BATCH, graph="c.onnx"), run_encoder(restored, BATCH)
    np.testing.assert_allclose(hidden[REAL], expected[REAL], atol=tolerance)
    assert external_tensors(folder / "c.onnx") == external_tensors(folder / "encoder.onnx")


@pytest.mark.parametrize(
    ("precision", "compute", "bounds", "cuda_heads"),
    [
        ("fp32", "fp16", (2e-4, 0.06), ()),
        ("int8", "fp32", (0, 1e-5), ("fill-mask", "sentence-order", "text-classification")),
    ],
)
def test_graphs_refer_to_weights_by_their_ranges_and_parity_shows_the_rounding_on_cuda(
    checkpoint: Path, tmp_path: Path, precision: str, compute: str, bounds: Any, cuda_heads: Any
) -> None:
    target = tmp_path / "bundle"
    bundle = export_bundle(checkpoint, target, precision=precision, cuda_precision=compute).bundle
    assert bundle.manifest.cuda_precision == compute
    parity = bundle.manifest.cuda_parity
    assert parity.keys() == {"encoder", *exporting.ALL_TASKS}
    assert all(bounds[0] < value < bounds[1] for value in parity.values()), parity
    cuda_graphs = {name for name in bundle.manifest.files if name.endswith(".cuda.onnx")}
    assert cuda_graphs == {f"{name}.cuda.onnx" for name in ("encoder", *cuda_heads)}
    assert not (target / ".emulated.onnx").exists()
    stored = read_header(target / "model.safetensors")
    for file in target.glob("*.onnx"):
        references = external_tensors(file)
        ranges = {name: (stored[name].offset, stored[name].num_bytes) for name in references}
        assert references == ranges
        assert len(set(references.values())) == len(references)
