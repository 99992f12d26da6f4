"""The graphs compute what torch and `transformers` do, over weights that they do not hold."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from albert_serve.bundle.manifest import Precision
from albert_serve.bundle.weights import expected_shapes, read_header
from albert_serve.config import AlbertConfig
from export.graph import CUDA_FORM, Compute
from export.models import build_encoder
from tests.export.exporting import (
    TINY,
    export_bundle,
    external_tensors,
    ragged,
    randomize,
    run_encoder,
    run_head,
    write_checkpoint,
    write_tokenizer,
)  # fmt: skip
from training.conversion.weight_files import restore_weights
from training.model.albert import ModelInputs


@pytest.fixture
def save_hf(tmp_path: Path) -> Callable[..., Any]:
    """Writes a model of `transformers` to `tmp_path / "checkpoint"`, and returns it."""

    def save(class_name: str, **changes: Any) -> Any:
        config = transformers.AlbertConfig(**{**TINY.to_hf(), **changes})
        model = getattr(transformers, class_name)(config).eval()
        randomize(model)
        model.save_pretrained(tmp_path / "checkpoint")
        write_tokenizer(tmp_path / "checkpoint")
        return model

    return save


def hf_outputs(model: Any) -> dict[str, Any]:
    """The logits of a model of `transformers` for the ragged batch, by the head's name."""
    sample = ragged(TINY)
    ids, types, mask = (
        torch.from_numpy(each) for each in (sample.ids, sample.types, sample.is_real.astype(int))
    )
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
    head = heads.get(type(model).__name__, "text-classification")
    return {head: outputs.logits}


@pytest.mark.parametrize("activation", ["gelu_new", "gelu"])
@pytest.mark.parametrize(
    "class_name",
    [
        *("AlbertModel", "AlbertForMaskedLM", "AlbertForPreTraining"),
        *("AlbertForSequenceClassification", "AlbertForQuestionAnswering"),
        "AlbertForTokenClassification",
    ],
)
def test_logits_are_those_of_transformers(
    tmp_path: Path, save_hf: Callable[..., Any], class_name: str, activation: str
) -> None:
    labels = {0: "bad", 1: "middling", 2: "good"}
    has_labels = class_name.endswith("Classification") or class_name == "AlbertForPreTraining"
    named = {"id2label": labels} if has_labels else {}
    model = save_hf(class_name, hidden_act=activation, **named)
    export_bundle(tmp_path / "checkpoint", tmp_path / "bundle")
    hidden, is_real = run_encoder(tmp_path / "bundle", ragged(TINY)), ragged(TINY).is_real
    for head, expected in hf_outputs(model).items():
        of_tokens = expected.ndim == 3
        got = hidden[is_real] if of_tokens else hidden[:, 0]
        if head:
            got = run_head(tmp_path / "bundle", head, got)
        wanted = expected.numpy()[is_real] if of_tokens else expected.numpy()
        wanted = wanted[:, :2] if head == "sentence-order" else wanted
        np.testing.assert_allclose(got, wanted, atol=1e-5)


def test_a_tied_copy_is_left_out(tmp_path: Path, save_hf: Callable[..., Any]) -> None:
    save_hf("AlbertForMaskedLM")
    file = tmp_path / "checkpoint/model.safetensors"
    tensors = load_file(file)
    copy = tensors["albert.embeddings.word_embeddings.weight"].clone()
    save_file({**tensors, "predictions.decoder.weight": copy}, file)

    exported = export_bundle(tmp_path / "checkpoint", tmp_path / "bundle")

    assert exported.unused == []
    assert load_file(tmp_path / "bundle/model.safetensors").keys() == tensors.keys()


def test_a_repeated_export_is_the_same(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    first = export_bundle(tmp_path / "checkpoint", tmp_path / "one").bundle
    shutil.copytree(tmp_path / "checkpoint", tmp_path / "copy/checkpoint")
    second = export_bundle(tmp_path / "copy/checkpoint", tmp_path / "two").bundle

    assert first.manifest.files == second.manifest.files


pytestmark = pytest.mark.process

CONFIGS = [
    pytest.param(TINY, id="one-group"),
    pytest.param(replace(TINY, num_groups=2), id="two-groups"),
    pytest.param(replace(TINY, num_groups=3), id="uneven-groups"),
    pytest.param(replace(TINY, num_groups=4), id="group-a-layer"),
    pytest.param(replace(TINY, num_inner_layers=2), id="inner-layers"),
    pytest.param(replace(TINY, num_groups=2, num_inner_layers=2), id="groups-of-inner-layers"),
    pytest.param(replace(TINY, sharing="attention"), id="sharing-attention"),
    pytest.param(replace(TINY, sharing="ffn"), id="sharing-ffn"),
    pytest.param(replace(TINY, sharing="none"), id="sharing-none"),
    pytest.param(replace(TINY, sharing="ffn", num_inner_layers=2), id="sharing-ffn-inner-layers"),
    pytest.param(replace(TINY, num_layers=1), id="one-layer"),
    pytest.param(replace(TINY, embedding_size=24), id="e-equals-h"),
    pytest.param(replace(TINY, num_heads=1), id="one-head"),
    pytest.param(replace(TINY, activation="gelu"), id="exact-gelu"),
    pytest.param(replace(TINY, layer_norm_eps=0.1), id="large-epsilon"),
    pytest.param(replace(TINY, max_positions=8, num_token_types=3), id="few-positions"),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_hidden_states_are_torchs_by_weights_referred_to_once(
    config: AlbertConfig, tmp_path: Path
) -> None:
    model = write_checkpoint(tmp_path / "checkpoint", config, tasks=())
    export_bundle(tmp_path / "checkpoint", tmp_path / "bundle")
    sample = ragged(config)
    batch = ModelInputs(
        ids=torch.from_numpy(sample.ids),
        types=torch.from_numpy(sample.types),
        lengths=torch.from_numpy(sample.lengths).long(),
    )
    with torch.inference_mode():
        expected = model(batch).numpy()

    got = run_encoder(tmp_path / "bundle", sample)

    assert got.shape == expected.shape
    np.testing.assert_allclose(got[sample.is_real], expected[sample.is_real], atol=1e-5)
    references = external_tensors(tmp_path / "bundle/encoder.onnx")
    assert references.keys() == expected_shapes(config, {}).keys()
    assert len(set(references.values())) == len(references)


def test_what_is_in_the_padding_does_not_matter(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint", tasks=())
    export_bundle(tmp_path / "checkpoint", tmp_path / "bundle")
    sample = ragged(TINY)
    other = ragged(TINY, seed=2)
    mixed = replace(
        sample,
        ids=np.where(sample.is_real, sample.ids, other.ids),
        types=np.where(sample.is_real, sample.types, other.types),
    )
    assert (mixed.ids != sample.ids).any()

    one, two = (run_encoder(tmp_path / "bundle", each) for each in (sample, mixed))

    np.testing.assert_array_equal(one[sample.is_real], two[sample.is_real])


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize(("compute", "worst"), [("fp32", 2e-6), ("fp16", 0.004)])
def test_the_form_for_cuda_computes_the_same(
    precision: Precision, compute: Compute, worst: float, tmp_path: Path
) -> None:
    """On the CPU, which has the same operators; the weights are those of the bundle."""
    config = replace(TINY, num_groups=2)
    write_checkpoint(tmp_path / "checkpoint", config, tasks=())
    folder = export_bundle(
        tmp_path / "checkpoint", tmp_path / "b", precision=precision
    ).bundle.folder
    stored = read_header(folder / "model.safetensors")
    form = replace(CUDA_FORM, compute=compute)
    onnx.save(build_encoder(config, stored, form), folder / "cuda.onnx")
    restored = tmp_path / "restored"
    restored.mkdir()
    restore_weights(folder / "model.safetensors", restored / "model.safetensors")
    plain = build_encoder(config, read_header(restored / "model.safetensors"))
    onnx.save(plain, restored / "encoder.onnx")
    sample = ragged(config)

    got = run_encoder(folder, sample, graph="cuda.onnx")

    expected = run_encoder(restored, sample)
    np.testing.assert_allclose(got[sample.is_real], expected[sample.is_real], atol=worst)
    assert external_tensors(folder / "cuda.onnx") == external_tensors(folder / "encoder.onnx")
