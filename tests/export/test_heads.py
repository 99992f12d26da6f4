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

from export.write import export_bundle
from tests.export.exporting import (
    ALL_TASKS,
    TINY,
    Floats,
    ragged,
    randomize,
    run_encoder,
    run_head,
    write_checkpoint,
    write_tokenizer,
)  # fmt: skip
from training.model.checkpoint import CheckpointError


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


def hf_outputs(model: Any) -> Any:
    """The logits of the model of `transformers` for the ragged batch."""
    sample = ragged(TINY)
    with torch.inference_mode():
        return model(
            input_ids=torch.from_numpy(sample.ids),
            token_type_ids=torch.from_numpy(sample.types),
            attention_mask=torch.from_numpy(sample.is_real).long(),
        )


def export_and_encode(tmp_path: Path) -> Floats:
    export_bundle(tmp_path / "checkpoint", tmp_path / "bundle")
    return run_encoder(tmp_path / "bundle", ragged(TINY))


@pytest.mark.parametrize("activation", ["gelu_new", "gelu"])
def test_bare_model(tmp_path: Path, save_hf: Callable[..., Any], activation: str) -> None:
    model = save_hf("AlbertModel", hidden_act=activation)
    is_real = ragged(TINY).is_real

    hidden = export_and_encode(tmp_path)

    expected = hf_outputs(model).last_hidden_state.numpy()
    np.testing.assert_allclose(hidden[is_real], expected[is_real], atol=1e-5)


@pytest.mark.parametrize("class_name", ["AlbertForMaskedLM", "AlbertForPreTraining"])
@pytest.mark.parametrize("activation", ["gelu_new", "gelu"])
def test_fill_mask(
    tmp_path: Path, save_hf: Callable[..., Any], class_name: str, activation: str
) -> None:
    model = save_hf(class_name, hidden_act=activation)
    is_real = ragged(TINY).is_real

    hidden = export_and_encode(tmp_path)
    got = run_head(tmp_path / "bundle", "fill-mask", hidden[is_real])

    outputs = hf_outputs(model)
    logits = outputs.logits if "logits" in outputs else outputs.prediction_logits
    np.testing.assert_allclose(got, logits.numpy()[is_real], atol=1e-5)


def test_sentence_order(tmp_path: Path, save_hf: Callable[..., Any]) -> None:
    model = save_hf("AlbertForPreTraining")

    got = run_head(tmp_path / "bundle", "sentence-order", export_and_encode(tmp_path)[:, 0])

    np.testing.assert_allclose(got, hf_outputs(model).sop_logits.numpy(), atol=1e-5)


def test_text_classification(tmp_path: Path, save_hf: Callable[..., Any]) -> None:
    labels = {0: "bad", 1: "middling", 2: "good"}
    model = save_hf("AlbertForSequenceClassification", id2label=labels)

    got = run_head(tmp_path / "bundle", "text-classification", export_and_encode(tmp_path)[:, 0])

    np.testing.assert_allclose(got, hf_outputs(model).logits.numpy(), atol=1e-5)


def test_question_answering(tmp_path: Path, save_hf: Callable[..., Any]) -> None:
    model = save_hf("AlbertForQuestionAnswering")
    is_real = ragged(TINY).is_real

    hidden = export_and_encode(tmp_path)
    got = run_head(tmp_path / "bundle", "question-answering", hidden[is_real])

    outputs = hf_outputs(model)
    expected = torch.stack([outputs.start_logits, outputs.end_logits], dim=-1).numpy()
    np.testing.assert_allclose(got, expected[is_real], atol=1e-5)


def test_multiple_choice(tmp_path: Path, save_hf: Callable[..., Any]) -> None:
    model = save_hf("AlbertForMultipleChoice")
    sample = ragged(TINY)
    with torch.inference_mode():
        expected = model(
            input_ids=torch.from_numpy(sample.ids)[None],
            token_type_ids=torch.from_numpy(sample.types)[None],
            attention_mask=torch.from_numpy(sample.is_real).long()[None],
        ).logits.numpy()

    got = run_head(tmp_path / "bundle", "multiple-choice", export_and_encode(tmp_path)[:, 0])

    np.testing.assert_allclose(got.T, expected, atol=1e-5)


def test_one_file_may_hold_all_heads(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "checkpoint")

    hidden = export_and_encode(tmp_path)

    rows = hidden[:, 0]
    for task in ALL_TASKS:
        with torch.inference_mode():
            expected = model.logits(task, torch.from_numpy(rows)).numpy()
        np.testing.assert_allclose(run_head(tmp_path / "bundle", task, rows), expected, atol=1e-5)


def test_a_head_takes_any_number_of_rows(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    rows = export_and_encode(tmp_path)[3]
    for task in ALL_TASKS:
        together = run_head(tmp_path / "bundle", task, rows)
        for num_rows in (1, 17):
            got = run_head(tmp_path / "bundle", task, rows[:num_rows])
            np.testing.assert_allclose(got, together[:num_rows], atol=1e-5)


def test_a_tied_copy_is_left_out(tmp_path: Path, save_hf: Callable[..., Any]) -> None:
    save_hf("AlbertForMaskedLM")
    file = tmp_path / "checkpoint/model.safetensors"
    tensors = load_file(file)
    copy = tensors["albert.embeddings.word_embeddings.weight"].clone()
    save_file({**tensors, "predictions.decoder.weight": copy}, file)

    exported = export_bundle(tmp_path / "checkpoint", tmp_path / "bundle")

    assert exported.unused == []
    assert load_file(tmp_path / "bundle/model.safetensors").keys() == tensors.keys()


def test_an_untied_decoder_is_refused(tmp_path: Path, save_hf: Callable[..., Any]) -> None:
    save_hf("AlbertForMaskedLM")
    file = tmp_path / "checkpoint/model.safetensors"
    tensors = load_file(file)
    other = tensors["albert.embeddings.word_embeddings.weight"] + 1
    save_file({**tensors, "predictions.decoder.weight": other}, file)

    with pytest.raises(CheckpointError, match="ALBERT ties the two"):
        export_bundle(tmp_path / "checkpoint", tmp_path / "bundle")


def test_an_unknown_head_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint", tasks=())
    file = tmp_path / "checkpoint/model.safetensors"
    save_file({**load_file(file), "tagger.weight": torch.zeros(3, 24)}, file)

    assert export_bundle(tmp_path / "checkpoint", tmp_path / "bundle").unused == ["tagger.weight"]


def test_a_repeated_export_is_the_same(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    first = export_bundle(tmp_path / "checkpoint", tmp_path / "one").bundle
    shutil.copytree(tmp_path / "checkpoint", tmp_path / "copy/checkpoint")
    second = export_bundle(tmp_path / "copy/checkpoint", tmp_path / "two").bundle

    assert first.manifest.files == second.manifest.files
