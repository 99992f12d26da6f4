"""Devices: equality of answers with the CPU, full devices, drivers, and CUDA kernels."""

from __future__ import annotations

import ctypes
import json
import struct
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Final, get_args

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

from albert_serve.bundle.manifest import Precision
from albert_serve.bundle.weights import SCALE_SUFFIX, expected_shapes, read_header
from albert_serve.config import AlbertConfig, preset
from albert_serve.errors import EngineError
from albert_serve.runtime import cuda
from albert_serve.runtime.cuda import cuda_provider
from albert_serve.runtime.encoders import EncoderPool
from albert_serve.runtime.engine import Engine
from albert_serve.runtime.ort import cuda_options, open_session
from albert_serve.settings import Device, RuntimeOptions
from albert_serve.tasks.base import EncoderInput
from export.graph import CUDA_VERSION, Compute
from export.models import build_encoder, build_head
from export.precision import part_of
from tests.albert_serve.batching.engines import some_inputs
from tests.devices import each_device
from tests.export.exporting import export_bundle

# The largest difference divided by the largest logit, as in docs/measurements.md.
LIMITS = {"fp32": 1e-4, "fp16": 0.06, "bf16": 0.3}


@each_device
@pytest.mark.parametrize("compute", get_args(Compute))
def test_answers_of_a_device_equal_the_answers_of_the_cpu(
    checkpoint_dir: Path, bundle_dir: Path, tmp_path: Path, device: Device, compute: Compute
) -> None:
    """Shapes vary. Two models share the device, and one of them is closed during the test."""
    exported = export_bundle(checkpoint_dir, tmp_path / "bundle", cuda_precision=compute)
    folder = exported.bundle.folder
    pool, options = EncoderPool(), RuntimeOptions(device=device, num_threads=1)
    cpu_engine = Engine.open(bundle_dir, RuntimeOptions(device="cpu", num_threads=1))
    engine, closed_engine = (Engine.open(folder, options, pool) for _ in range(2))
    engine.warm_up()
    limit = 1e-4 if device == "cpu" else LIMITS[compute]
    for round_ in range(4):
        inputs = some_inputs(engine.tasks, seed=round_ // 2) * (1 + round_)
        for logits, expected in zip(engine.run(inputs), cpu_engine.run(inputs), strict=True):
            assert np.abs(logits - expected).max() < limit * max(1, np.abs(expected).max())
        if round_ == 2:
            closed_engine.warm_up()
            del closed_engine
    assert engine.device == device


@pytest.mark.gpu
def test_a_full_device_fails_only_calls_that_need_more_memory(bundle_dir: Path) -> None:
    """After memory is free again, another model can be opened."""
    options = RuntimeOptions(device="cuda", num_threads=1)
    engine = Engine.open(bundle_dir, options)
    engine.warm_up()
    short = [EncoderInput(ids=[5] * 16, types=[0] * 16, task="fill-mask", rows=[0])]
    (expected,) = engine.run_batch(short)
    length = engine.config.max_positions
    long = [EncoderInput(ids=[5] * length, types=[0] * length, task="fill-mask", rows=[0])]
    filler = torch.empty(torch.cuda.mem_get_info()[0] - (8 << 20), dtype=torch.uint8, device="cuda")
    with pytest.raises(EngineError, match="runtime failed on ids"):
        engine.run_batch(long * (1_000_000 // length))
    assert np.array_equal(engine.run_batch(short)[0], expected)
    del filler
    torch.cuda.empty_cache()
    assert Engine.open(bundle_dir, options).device == "cuda"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that installs a fake NVIDIA driver, and an onnxruntime that supports CUDA."""

    def install(num_devices: int, version: int = 13_000) -> None:
        fake = SimpleNamespace(
            cuInit=lambda _flags: 0,
            cuDeviceGetCount=lambda count: setattr(count._obj, "value", num_devices),
            cuDriverGetVersion=lambda number: setattr(number._obj, "value", version),
        )
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, **_options: fake)
        monkeypatch.setattr(ort, "get_available_providers", lambda: [cuda.PROVIDER])
        monkeypatch.setattr(ort, "preload_dlls", lambda **_: None)

    return install


def test_cuda_needs_a_device_and_a_new_driver(driver: Callable[..., None]) -> None:
    driver(1, 13_000)
    assert cuda.no_cuda_reason() is None
    driver(0, 13_000)
    assert "no device" in str(cuda.no_cuda_reason())
    driver(1, 12_999)
    assert "supports CUDA 12.99, but CUDA 13 " in str(cuda.no_cuda_reason())


def test_workers_use_devices_in_turn_and_a_new_worker_replaces_an_ended_one(
    driver: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = cuda.own_device.__wrapped__
    monkeypatch.setattr(cuda, "_LOCKS", [])
    driver(2)
    assert [device() for _ in range(2)] == [0, 0]  # without a service, always the first
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    assert [device() for _ in range(3)] == [0, 1, 0]
    cuda._LOCKS[1].release()
    assert device() == 1
    driver(1)
    assert device() == 0


TASKS: Final = {"fill-mask": 30000, "sentence-order": 2, "question-answering": 2}


def write_zeros(config: AlbertConfig, precision: Precision, file: Path) -> None:
    """Write a sparse weight file of zeros, which uses no disk space."""
    num_bytes = {"F32": 4, "F16": 2, "I8": 1}
    header, offset = {}, 0
    for name, shape in expected_shapes(config, TASKS).items():
        is_fp32 = precision == "fp32" or part_of(name) is None
        dtype = "F32" if is_fp32 else "F16" if precision == "fp16" else "I8"
        tensors = [(name, shape[::-1] if dtype == "I8" else shape, dtype)]
        if dtype == "I8":
            tensors.append((name + SCALE_SUFFIX, shape[:1], "F32"))
        for tensor, dims, stored_dtype in tensors:
            offsets = [offset, offset + int(np.prod(dims)) * num_bytes[stored_dtype]]
            header[tensor] = {"dtype": stored_dtype, "shape": list(dims), "data_offsets": offsets}
            offset = offsets[1]
    text = json.dumps(header).encode()
    with file.open("wb") as output:
        output.write(struct.pack("<Q", len(text)) + text)
        output.truncate(8 + len(text) + offset)


def read_placement(graph: Path) -> tuple[dict[str, Counter[str]], list[str]]:
    """Return the operators by provider, and the operators of the optimised graph."""
    options = cuda_options()
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    options.optimized_model_filepath = str(graph.with_suffix(".optimized"))
    session = open_session(graph, options, cuda=cuda_provider())
    operators: dict[str, Counter[str]] = defaultdict(Counter)
    for part in session.get_provider_graph_assignment_info():
        operators[part.ep_name].update(node.op_type for node in part.get_nodes())
    optimized = onnx.load(graph.with_suffix(".optimized"), load_external_data=False)
    return operators, [node.op_type for node in optimized.graph.node]


@pytest.mark.gpu
@pytest.mark.parametrize("compute", get_args(Compute))
@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("size", ["base", "xlarge"])  # attention heads of 64 and 128
def test_every_node_has_a_cuda_kernel(
    size: str, precision: Precision, compute: Compute, tmp_path: Path
) -> None:
    config = preset(size)
    write_zeros(config, precision, tmp_path / "model.safetensors")
    stored = read_header(tmp_path / "model.safetensors")
    version = replace(CUDA_VERSION, compute=compute)
    graphs = {"encoder": build_encoder(config, stored, version)}
    for task, num_outputs in TASKS.items():
        graphs[task] = build_head(config, task, num_outputs, stored, version)
    for name, model in graphs.items():
        onnx.save(model, tmp_path / f"{name}.onnx")
        operators, nodes = read_placement(tmp_path / f"{name}.onnx")
        # The CPU joins the three numbers of the shape of the hidden states.
        on_cpu = Counter({"Concat": 1} if name == "encoder" else {})
        assert operators["CPUExecutionProvider"] == on_cpu
        assert not [op for op in nodes if op.startswith("Memcpy")]
        assert "DequantizeLinear" not in nodes  # the optimiser removes it
        is_int8_encoder = (precision, name) == ("int8", "encoder")
        assert nodes.count("Transpose") == is_int8_encoder  # of the word embeddings
        assert nodes.count("Cast") <= (3 if name == "encoder" else 0)
