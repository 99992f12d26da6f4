"""The graphs compute what torch and `transformers` do, over weights that they do not contain."""

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
from albert_serve.bundle.weights import (
    read_header,
)
from albert_serve.config import AlbertConfig
from albert_serve.runtime.engine import Engine
from albert_serve.tasks.base import EncoderInput
from albert_serve.tokenizer import AlbertTokenizer
from export.graph import CUDA_VERSION, Compute
from export.models import build_encoder
from tests.export.exporting import (
    ALL_TASKS,
    TINY,
    export_bundle,
    external_tensors,
    is_real,
    ragged,
    randomize,
    run_encoder,
    run_head,
    write_checkpoint,
    write_tokenizer,
)
from training.conversion.weight_files import restore_weights
from training.model.albert import ModelInputs

pytestmark = pytest.mark.process


def hf_logits(model: Any) -> dict[str, Any]:
    """Return the logits of a model of `transformers` for the ragged batch, by the head's name."""
    batch = ragged(TINY)
    ids, types, mask = map(torch.from_numpy, (batch.ids, batch.types, is_real(batch).astype(int)))
    with torch.inference_mode():
        outputs = model(input_ids=ids, token_type_ids=types, attention_mask=mask)
    if "last_hidden_state" in outputs:
        return {"": outputs.last_hidden_state}
    if "prediction_logits" in outputs:
        return {"fill-mask": outputs.prediction_logits, "sentence-order": outputs.sop_logits}
    if "start_logits" in outputs:
        logits = torch.stack([outputs.start_logits, outputs.end_logits], dim=-1)
        return {"question-answering": logits}
    heads = {
        "AlbertForMaskedLM": "fill-mask",
        "AlbertForTokenClassification": "token-classification",
    }
    return {heads.get(type(model).__name__, "text-classification"): outputs.logits}


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
    # The head for sentence order of `transformers` has an output for each label, ours has two.
    labels = ["bad", "middling", "good"][: 2 if "Question" in class_name else 3]
    config = transformers.AlbertConfig(
        **{**TINY.to_hf(), "hidden_act": activation, "id2label": dict(enumerate(labels))}
    )
    model = getattr(transformers, class_name)(config).eval()
    randomize(model)
    model.save_pretrained(checkpoint)
    write_tokenizer(checkpoint)
    tensors = load_file(checkpoint / "model.safetensors")
    if class_name == "AlbertForMaskedLM":  # old versions store the tied matrix twice
        copy = tensors["albert.embeddings.word_embeddings.weight"]
        twice = {**tensors, "predictions.decoder.weight": copy}
        save_file(twice, checkpoint / "model.safetensors", {"format": "pt"})

    exported = export_bundle(checkpoint, tmp_path / "bundle")

    if class_name != "AlbertModel":
        assert exported.unused == []
        assert load_file(tmp_path / "bundle/model.safetensors").keys() == tensors.keys()
    hidden, real = run_encoder(tmp_path / "bundle", ragged(TINY)), is_real(ragged(TINY))
    for head, expected in hf_logits(model).items():
        rows = real if expected.ndim == 3 else np.s_[:, 0]
        got = run_head(tmp_path / "bundle", head, hidden[rows]) if head else hidden[rows]
        expected = expected.numpy()[rows] if expected.ndim == 3 else expected.numpy()
        expected = expected[:, :2] if head == "sentence-order" else expected
        np.testing.assert_allclose(got, expected, atol=1e-5)


def test_an_fp32_bundle_is_a_checkpoint_of_transformers(
    real_checkpoint: Path, tmp_path: Path
) -> None:
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
    (got,) = Engine.open(bundle).run([masked])
    np.testing.assert_allclose(got[0], logits[mask].numpy(), atol=1e-4)


CONFIGS: Final = {
    "uneven-groups": replace(TINY, num_groups=3),
    "groups-of-inner-layers": replace(TINY, num_groups=2, num_inner_layers=2),
    "sharing-attention": replace(TINY, sharing="attention"),
    "sharing-ffn-inner-layers": replace(TINY, sharing="ffn", num_inner_layers=2),
    "one-layer": replace(TINY, num_layers=1, embedding_size=24),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_hidden_states_are_torchs_whatever_the_padding(
    config: AlbertConfig, tmp_path: Path
) -> None:
    model = write_checkpoint(tmp_path / "checkpoint", config, tasks=())
    export_bundle(tmp_path / "checkpoint", tmp_path / "bundle")
    batch, other = ragged(config), ragged(config, seed=2)
    real = is_real(batch)
    ids, types, lengths = map(torch.from_numpy, (batch.ids, batch.types, batch.lengths))
    with torch.inference_mode():
        expected = model(ModelInputs(ids=ids, types=types, lengths=lengths)).numpy()

    got = run_encoder(tmp_path / "bundle", batch)

    assert got.shape == expected.shape
    np.testing.assert_allclose(got[real], expected[real], atol=1e-5)
    padded = replace(
        batch,
        ids=np.where(real, batch.ids, other.ids),
        types=np.where(real, batch.types, other.types),
    )
    np.testing.assert_array_equal(run_encoder(tmp_path / "bundle", padded)[real], got[real])


@pytest.mark.parametrize(
    ("precision", "compute", "tolerance"),
    [("fp32", "fp16", 0.004), ("fp16", "fp32", 2e-6), ("int8", "fp32", 2e-6)],
)
def test_the_version_for_cuda_computes_the_same(
    precision: Precision, compute: Compute, tolerance: float, tmp_path: Path
) -> None:
    """It reads the weights of the bundle; the CPU has its operators, too."""
    config = replace(TINY, num_groups=2)
    write_checkpoint(tmp_path / "checkpoint", config, tasks=())
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
    batch = ragged(config)
    real = is_real(batch)

    got = run_encoder(folder, batch, graph="c.onnx")

    np.testing.assert_allclose(got[real], run_encoder(restored, batch)[real], atol=tolerance)
    assert external_tensors(folder / "c.onnx") == external_tensors(folder / "encoder.onnx")


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_the_graphs_refer_to_each_weight_by_its_one_range(
    checkpoint: Path, tmp_path: Path, precision: Precision
) -> None:
    folder = export_bundle(checkpoint, tmp_path / "bundle", precision=precision).bundle.folder
    stored = read_header(folder / "model.safetensors")
    for file in folder.glob("*.onnx"):
        references = external_tensors(file)
        ranges = {name: (stored[name].offset, stored[name].num_bytes) for name in references}
        assert references == ranges
        assert len(set(references.values())) == len(references)


@pytest.mark.parametrize(
    ("precision", "compute", "low", "high"),
    [("fp32", "fp16", 2e-4, 0.06), ("int8", "fp32", 0, 1e-5)],
)
def test_parity_of_the_graphs_for_cuda_shows_their_rounding(
    checkpoint: Path,
    tmp_path: Path,
    precision: Precision,
    compute: Compute,
    low: float,
    high: float,
) -> None:
    target = tmp_path / "bundle"
    bundle = export_bundle(checkpoint, target, precision=precision, cuda_precision=compute).bundle
    assert bundle.manifest.cuda_precision == compute
    parity = bundle.manifest.cuda_parity
    assert parity.keys() == {"encoder", *ALL_TASKS}
    assert all(low < value < high for value in parity.values()), parity
    cuda_graphs = {name for name in bundle.manifest.files if name.endswith(".cuda.onnx")}
    in_int8 = ("fill-mask", "sentence-order", "text-classification")
    own = {f"{task}.cuda.onnx" for task in in_int8} if precision == "int8" else set()
    assert cuda_graphs == {"encoder.cuda.onnx", *own}
    assert not (target / ".emulated.onnx").exists()
