"""Checkpoints that cannot be exported are refused by name, with what to do about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from albert_serve.bundle.weights import TaskName
from albert_serve.errors import BundleCorruptError
from export.errors import ExportError
from export.source import read_source
from tests.export.exporting import ALL_TASKS, TINY, write_checkpoint
from training.model.checkpoint import CheckpointError


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_weights(folder: Path, **changes: torch.Tensor) -> None:
    file = folder / "model.safetensors"
    save_file({**load_file(file), **changes}, file)


def test_a_sound_checkpoint_is_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "evaluation.json").write_text('{"accuracy": 0.9}')
    (tmp_path / "training.json").write_text('{"steps": 3}')

    source = read_source(tmp_path)

    assert source.config == TINY
    assert set(source.tasks) == set(ALL_TASKS)
    assert source.num_outputs["fill-mask"] == TINY.vocab_size
    assert source.evaluation == {"accuracy": 0.9}
    assert source.training == {"steps": 3}


def test_a_head_for_the_next_sentence_is_not_one_for_order(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    change_config(tmp_path, albert_sentence_task="sop")
    assert "sentence-order" in read_source(tmp_path).tasks
    change_config(tmp_path, albert_sentence_task="nsp")
    assert set(read_source(tmp_path).tasks) == set(ALL_TASKS) - {"sentence-order"}


@pytest.mark.parametrize(
    ("config", "labels", "problem_type"),
    [
        ({}, ["LABEL_0", "LABEL_1"], "single_label_classification"),
        ({"id2label": {"0": "no", "1": "yes"}}, ["no", "yes"], "single_label_classification"),
        (
            {"problem_type": "multi_label_classification"},
            ["LABEL_0", "LABEL_1"],
            "multi_label_classification",
        ),
    ],
)
def test_labels(
    tmp_path: Path, config: dict[str, Any], labels: list[str], problem_type: str
) -> None:
    write_checkpoint(tmp_path, tasks=("text-classification",), extra_config=config)

    entry = read_source(tmp_path).tasks["text-classification"]

    assert entry.labels == labels
    assert entry.problem_type == problem_type


@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        ("AlbertForMultipleChoice", "multiple-choice"),
        ("AlbertForSequenceClassification", "text-classification"),
    ],
)
def test_one_output_is_what_the_architecture_says(
    tmp_path: Path, architecture: str, task: TaskName
) -> None:
    write_checkpoint(tmp_path, tasks=("multiple-choice",))
    change_config(tmp_path, architectures=[architecture])

    tasks = read_source(tmp_path).tasks

    assert list(tasks) == [task]
    assert tasks[task].num_outputs == 1
    expected = "regression" if task == "text-classification" else None
    assert tasks[task].problem_type == expected


def test_labels_that_contradict_the_weights(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, extra_config={"id2label": {"0": "a", "1": "b", "2": "c"}})
    with pytest.raises(ExportError, match="the classifier has 2 outputs"):
        read_source(tmp_path)


def test_an_unknown_problem_type(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, extra_config={"problem_type": "ranking"})
    with pytest.raises(ExportError, match=r"problem_type is 'ranking'.*regression"):
        read_source(tmp_path)


def test_no_weights(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ExportError, match=r"is not there; .* has no weights"):
        read_source(tmp_path)


@pytest.mark.parametrize("name", ["AlbertForTokenClassification", "AlbertForSomething"])
def test_an_architecture_whose_head_is_unknown(tmp_path: Path, name: str) -> None:
    write_checkpoint(tmp_path, tasks=("text-classification",))
    change_config(tmp_path, architectures=[name])
    with pytest.raises(CheckpointError, match=f"the model is {name}, which none of the tasks"):
        read_source(tmp_path)


def test_no_tokenizer(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ExportError, match=r"neither tokenizer\.json nor spiece\.model"):
        read_source(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(tmp_path: Path, dtype: torch.dtype) -> None:
    write_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(file).items()}, file)
    with pytest.raises(ExportError, match="only F32 is exported") as caught:
        read_source(tmp_path)
    assert ("BF16" if dtype is torch.bfloat16 else "F16") in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite(tmp_path: Path, value: float) -> None:
    write_checkpoint(tmp_path)
    name = "albert.encoder.albert_layer_groups.0.albert_layers.0.ffn.bias"
    bias = load_file(tmp_path / "model.safetensors")[name]
    bias[-1] = value
    change_weights(tmp_path, **{name: bias})
    with pytest.raises(ExportError, match=f"{name} holds? NaN or infinite"):
        read_source(tmp_path)


@pytest.mark.parametrize("num_bytes", [0, 4, 100, 5000])
def test_truncated_weights(tmp_path: Path, num_bytes: int) -> None:
    write_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:num_bytes])
    with pytest.raises(BundleCorruptError, match=f"{num_bytes} bytes"):
        read_source(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 48}, r"shape \(24, 12\); the config asks for \(48, 12\)"),
        ({"vocab_size": 51}, r"word_embeddings.weight has shape \(50, 12\)"),
        ({"num_hidden_groups": 2}, "no albert.encoder.albert_layer_groups.1"),
        ({"intermediate_size": 41}, r"ffn.weight has shape \(40, 24\)"),
    ],
)
def test_a_config_that_contradicts_the_weights(
    tmp_path: Path, changes: dict[str, int], message: str
) -> None:
    write_checkpoint(tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(BundleCorruptError, match=message):
        read_source(tmp_path)
