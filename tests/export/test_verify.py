"""The checks of a new bundle find wrong weights, graphs and outputs; graphs stay small."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from albert_serve.bundle.manifest import Precision
from albert_serve.bundle.weights import (
    SCALE_SUFFIX,
    Shape,
    StoredTensor,
    expected_shapes,
    read_header,
)
from albert_serve.config import preset
from albert_serve.tokenizer import SPECIAL_TOKENS
from export.config import ExportError
from export.graph import CUDA_FORM, Compute
from export.models import build_encoder, build_head
from export.precision import part_of
from export.source import read_source
from export.verify import check_parity, measure_parity
from tests.export.exporting import (
    ALL_TASKS,
    TINY,
    export_bundle,
    external_tensors,
    write_checkpoint,
)
from training.model.checkpoint import save_checkpoint

pytestmark = pytest.mark.process

CLS, SEP, MASK = (SPECIAL_TOKENS.index(token) for token in ("[CLS]", "[SEP]", "[MASK]"))


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """A folder with a checkpoint and its bundle."""
    write_checkpoint(tmp_path / "checkpoint")
    export_bundle(tmp_path / "checkpoint", tmp_path / "bundle")
    return tmp_path


@pytest.mark.parametrize(
    ("weight", "worse"),
    [
        pytest.param("albert.encoder.attentions.0.key.bias", "", id="cancels-in-the-softmax"),
        pytest.param("albert.encoder.attentions.0.value.bias", "encoder", id="attention"),
        pytest.param("albert.encoder.ffns.0.up.weight", "encoder", id="ffn"),
        pytest.param("albert.embeddings.norm.bias", "encoder", id="embeddings"),
        pytest.param("heads.fill-mask.decoder.bias", "fill-mask", id="fill-mask"),
        pytest.param("pooler.dense.bias", "sentence-order", id="pooler"),
        pytest.param("heads.question-answering.output.bias", "question-answering", id="qa"),
    ],
)
def test_one_weight_that_differs_is_found(exported: Path, weight: str, worse: str) -> None:
    model = write_checkpoint(exported / "again")
    with torch.no_grad():
        dict(model.named_parameters())[weight].add_(0.01)
    heads = read_source(exported / "checkpoint").heads

    parity = measure_parity(exported / "bundle", heads, model)

    if worse:
        assert parity[worse] > 1e-4
        with pytest.raises(ExportError, match=worse):
            check_parity(parity, 1e-4, advice="")
    else:
        check_parity(parity, 1e-4, advice="")


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_the_graphs_reach_each_weight_at_its_one_range(
    exported: Path, precision: Precision
) -> None:
    bundle = export_bundle(exported / "checkpoint", exported / precision, precision=precision)
    folder = bundle.bundle.folder
    stored = read_header(folder / "model.safetensors")
    for file in folder.glob("*.onnx"):
        references = external_tensors(file)
        places = {name: (stored[name].offset, stored[name].num_bytes) for name in references}
        assert references == places
        assert len(set(references.values())) == len(references)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


@pytest.mark.parametrize(
    ("precision", "compute", "least", "most"),
    [
        ("fp32", "fp16", 2e-4, 0.06),
        ("fp16", "bf16", 2e-3, 0.3),
        ("int8", "fp32", 0, 1e-5),
        ("int8", "fp16", 2e-4, 0.06),
    ],
)
def test_parity_of_the_graphs_for_cuda_shows_their_rounding(
    checkpoint: Path,
    tmp_path: Path,
    precision: Precision,
    compute: Compute,
    least: float,
    most: float,
) -> None:
    target = tmp_path / "bundle"
    bundle = export_bundle(checkpoint, target, precision=precision, cuda_precision=compute).bundle
    assert bundle.manifest.cuda_precision == compute
    parity = bundle.manifest.cuda_parity
    assert parity.keys() == {"encoder", *ALL_TASKS}
    assert all(least < value < most for value in parity.values()), parity
    cuda_heads = {name for name in bundle.manifest.files if name.endswith(".cuda.onnx")}
    in_int8 = ("fill-mask", "sentence-order", "text-classification")
    own = {f"{task}.cuda.onnx" for task in in_int8} if precision == "int8" else set()
    assert cuda_heads == {"encoder.cuda.onnx", *own}
    assert not (target / ".emulated.onnx").exists()


def test_a_value_that_only_a_special_token_has_is_found(tmp_path: Path) -> None:
    """Among 30,000 tokens random ones would miss it; every real input has it."""
    folder = tmp_path / "checkpoint"
    model = write_checkpoint(folder, replace(TINY, vocab_size=30_000), tasks=("sentence-order",))
    with torch.no_grad():
        model.albert.embeddings.word.weight[SEP].mul_(1e6)
    save_checkpoint(model, folder)
    with pytest.raises(ExportError, match=r"in fp16, .*encoder nan.*--cuda-precision bf16"):
        export_bundle(folder, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()
    for compute in ("bf16", "fp32"):
        export_bundle(folder, tmp_path / compute, cuda_precision=compute)


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
