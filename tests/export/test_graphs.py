"""The operators and the size of the graphs of a bundle."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from onnx import AttributeProto, GraphProto

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

TWO_LAYERS = replace(TINY, num_layers=2)
BF16 = replace(CUDA_FORM, compute="bf16")


def weights_of(folder: Path, precision: str, config: AlbertConfig = TWO_LAYERS) -> Path:
    write_checkpoint(folder, config)
    if precision == "fp32":
        return folder / "model.safetensors"
    file = folder / f"{precision}.safetensors"
    write_weights(read_source(folder), file, precision, (), {})  # type: ignore[arg-type]
    return file


def count_operators(graph: GraphProto) -> Counter[str]:
    """Count the operators of a graph and of its subgraphs."""
    operators: Counter[str] = Counter()
    for node in graph.node:
        operators[node.op_type] += 1
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                operators += count_operators(attribute.g)
    return operators


@pytest.mark.parametrize(
    ("precision", "form", "operators"),
    [
        pytest.param("fp32", CPU_FORM, {"FusedMatMul": 7}, id="fp32"),
        # Query, key and value read the same quantised rows.
        pytest.param("int8", CPU_FORM, {"MatMulIntegerToFloat": 7, "QuantizeLinear": 5}, id="int8"),
        # A Cast a matrix, and one of the gathered rows of the word embeddings.
        pytest.param("fp16", CPU_FORM, {"FusedMatMul": 7, "Cast": 8}, id="fp16"),
        pytest.param("fp32", CUDA_FORM, {"FusedMatMul": 13}, id="cuda"),
        pytest.param("fp16", CUDA_FORM, {"FusedMatMul": 13}, id="cuda-of-fp16"),
        pytest.param("int8", BF16, {"FusedMatMul": 13, "DequantizeLinear": 7}, id="cuda-of-int8"),
    ],
)
def test_an_encoder_of_two_layers(
    precision: str, form: Form, operators: dict[str, int], tmp_path: Path
) -> None:
    """A Loop holds the layer once on a CPU; for CUDA, layers are unrolled and norms are fused."""
    stored = read_header(weights_of(tmp_path, precision))
    counted = count_operators(build_encoder(TWO_LAYERS, stored, form).graph)
    is_unrolled = form.kernels == "cuda"
    expected = {
        **dict.fromkeys(("FusedMatMul", "MatMulIntegerToFloat", "DequantizeLinear"), 0),
        "Loop": int(not is_unrolled),
        "Attention": 1 + is_unrolled,
        "FastGelu": 1 + is_unrolled,
        "SkipLayerNormalization": 4 * is_unrolled,
        **operators,
    }
    assert {name: counted[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("precision", "products"),
    [("fp32", "FusedMatMul"), ("fp16", "FusedMatMul"), ("int8", "MatMulIntegerToFloat")],
)
@pytest.mark.parametrize(
    ("task", "num_matrices", "num_vectors"),
    [("fill-mask", 2, 0), ("question-answering", 0, 1), ("sentence-order", 1, 1)],
)
def test_a_head_multiplies_matrices_in_the_bundles_precision_and_output_layers_in_fp32(
    task: TaskName,
    num_matrices: int,
    num_vectors: int,
    precision: str,
    products: str,
    tmp_path: Path,
) -> None:
    stored = read_header(weights_of(tmp_path, precision))
    num_outputs = TWO_LAYERS.vocab_size if task == "fill-mask" else 2
    counted = count_operators(build_head(TWO_LAYERS, task, num_outputs, stored).graph)
    expected = Counter({products: num_matrices}) + Counter({"FusedMatMul": num_vectors})
    assert Counter({name: counted[name] for name in ("FusedMatMul", products)}) == expected


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
