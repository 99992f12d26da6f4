"""The graphs as text: what is in a bundle, to be read. UPDATE_GOLDEN=1 writes them anew."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from onnx import ModelProto

from albert_serve.bundle.weights import (
    SCALE_SUFFIX,
    Shape,
    StoredTensor,
    TaskName,
    expected_shapes,
    read_header,
)
from albert_serve.config import AlbertConfig, preset
from export.encoder import build_encoder
from export.graph import CPU_FORM, CUDA_FORM, Form
from export.heads import build_head
from export.precision import part_of, write_weights
from export.source import read_source
from tests.export.exporting import TINY, write_checkpoint

GOLDEN = Path(__file__).parent / "golden"
TWO_LAYERS = replace(TINY, num_layers=2)
BF16 = replace(CUDA_FORM, compute="bf16")


def weights_of(folder: Path, precision: str, config: AlbertConfig = TWO_LAYERS) -> Path:
    write_checkpoint(folder, config)
    if precision == "fp32":
        return folder / "model.safetensors"
    file = folder / f"{precision}.safetensors"
    write_weights(read_source(folder), file, precision, (), {})  # type: ignore[arg-type]
    return file


def as_text(model: ModelProto) -> str:
    """ONNX's own text, without what differs from file to file: where a weight lies in it."""
    for tensor in model.graph.initializer:
        del tensor.external_data[1:]
    model.producer_version = ""
    text: str = onnx.printer.to_text(model)
    return text.rstrip() + "\n"


def assert_golden(model: ModelProto, name: str) -> None:
    file, text = GOLDEN / f"{name}.onnx.txt", as_text(model)
    if os.environ.get("UPDATE_GOLDEN"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert text == file.read_text()


@pytest.mark.parametrize(
    ("precision", "form", "name"),
    [
        pytest.param("fp32", CPU_FORM, "encoder", id="fp32"),
        pytest.param("int8", CPU_FORM, "encoder.int8", id="int8"),
        pytest.param("fp16", CPU_FORM, "encoder.fp16", id="fp16"),
        pytest.param("fp32", CUDA_FORM, "encoder.cuda", id="cuda"),
        pytest.param("fp16", CUDA_FORM, "encoder.cuda.fp16", id="cuda-of-fp16"),
        pytest.param("int8", BF16, "encoder.cuda-bf16.int8", id="cuda-bf16-of-int8"),
    ],
)
def test_encoder(precision: str, form: Form, name: str, tmp_path: Path) -> None:
    stored = read_header(weights_of(tmp_path, precision))
    model = build_encoder(TWO_LAYERS, stored, form)
    assert_golden(model, name)


@pytest.mark.parametrize("precision", ["fp32", "int8", "fp16"])
@pytest.mark.parametrize("task", ["fill-mask", "question-answering", "sentence-order"])
def test_head(task: TaskName, precision: str, tmp_path: Path) -> None:
    stored = read_header(weights_of(tmp_path, precision))
    num_outputs = TWO_LAYERS.vocab_size if task == "fill-mask" else 2
    model = build_head(TWO_LAYERS, task, num_outputs, stored)
    assert_golden(model, f"{task}.{precision}")


@pytest.mark.parametrize("dtype", ["F32", "F16", "I8"])
@pytest.mark.parametrize("size", ["base", "large", "xlarge", "xxlarge"])
def test_the_graphs_of_a_bundle_are_under_100_kb(size: str, dtype: str) -> None:
    config = preset(size)
    tasks = {"fill-mask": config.vocab_size, "question-answering": 2}
    tasks |= {"sentence-order": 2, "text-classification": 2}
    stored = pretend(expected_shapes(config, tasks), dtype)
    models = [
        build_encoder(config, stored),
        build_encoder(config, stored, CUDA_FORM),
        *(build_head(config, task, size, stored) for task, size in tasks.items()),
    ]
    assert sum(model.ByteSize() for model in models) < 100_000
    for model in models:
        assert all(t.ByteSize() < 4096 for t in model.graph.initializer if not t.external_data)


def pretend(shapes: dict[str, Shape], dtype: str) -> dict[str, StoredTensor]:
    """Places in a file of weights that is not there."""
    stored: dict[str, StoredTensor] = {}
    for name, shape in shapes.items():
        kind = dtype if part_of(name) else "F32"
        turned = shape[::-1] if kind == "I8" else shape
        stored[name] = StoredTensor(dtype=kind, shape=turned, offset=1 << 29, num_bytes=1 << 28)
        stored[name + SCALE_SUFFIX] = StoredTensor(
            dtype="F32", shape=shape[:1], offset=1 << 29, num_bytes=1 << 28
        )
    return stored
