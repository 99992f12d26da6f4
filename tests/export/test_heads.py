"""Checkpoints of every kind that `transformers` writes give its logits in ONNX Runtime."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from export.bundle import export_bundle
from tests.export.exporting import (
    TINY,
    ragged,
    randomize,
    run_encoder,
    run_head,
    write_checkpoint,
    write_tokenizer,
)  # fmt: skip


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
    if type(model).__name__ == "AlbertForMultipleChoice":
        ids, types, mask = ids[None], types[None], mask[None]
    with torch.inference_mode():
        outputs = model(input_ids=ids, token_type_ids=types, attention_mask=mask)
    if "last_hidden_state" in outputs:
        return {"": outputs.last_hidden_state}
    if "prediction_logits" in outputs:
        return {"fill-mask": outputs.prediction_logits, "sentence-order": outputs.sop_logits}
    if "start_logits" in outputs:
        logits = torch.stack([outputs.start_logits, outputs.end_logits], dim=-1)
        return {"question-answering": logits}
    heads = {"AlbertForMaskedLM": "fill-mask", "AlbertForMultipleChoice": "multiple-choice"}
    head = heads.get(type(model).__name__, "text-classification")
    return {head: outputs.logits.T if head == "multiple-choice" else outputs.logits}


@pytest.mark.parametrize("activation", ["gelu_new", "gelu"])
@pytest.mark.parametrize(
    "class_name",
    [
        *("AlbertModel", "AlbertForMaskedLM", "AlbertForPreTraining", "AlbertForMultipleChoice"),
        *("AlbertForSequenceClassification", "AlbertForQuestionAnswering"),
    ],
)
def test_logits_are_those_of_transformers(
    tmp_path: Path, save_hf: Callable[..., Any], class_name: str, activation: str
) -> None:
    labels = {0: "bad", 1: "middling", 2: "good"}
    has_labels = class_name in ("AlbertForSequenceClassification", "AlbertForPreTraining")
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
