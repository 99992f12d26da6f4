"""An exported bundle answers on every device as its checkpoint does on a CPU, by its kernels."""

from __future__ import annotations

import ctypes
import json
import re
import struct
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, get_args

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

# Largest difference over the largest logit, as in docs/measurements.md.
LIMITS = {"fp32": 1e-4, "fp16": 0.06, "bf16": 0.3}


@each_device
@pytest.mark.parametrize("compute", get_args(Compute))
def test_a_device_answers_as_the_cpu(
    checkpoint_dir: Path, bundle_dir: Path, tmp_path: Path, device: Device, compute: Compute
) -> None:
    """In every shape; two models at once, and one that was closed."""
    exported = export_bundle(checkpoint_dir, tmp_path / "bundle", cuda_precision=compute)
    folder = exported.bundle.folder
    pool, options = EncoderPool(), RuntimeOptions(device=device, num_threads=1)
    expected = Engine.open(bundle_dir, RuntimeOptions(device="cpu", num_threads=1))
    engine, other = (Engine.open(folder, options, pool) for _ in range(2))
    engine.warm_up()
    limit = 1e-4 if device == "cpu" else LIMITS[compute]
    for round_ in range(4):
        inputs = some_inputs(engine.tasks, seed=round_ // 2) * (1 + round_)
        for got, wanted in zip(engine.run(inputs), expected.run(inputs), strict=True):
            assert np.abs(got - wanted).max() < limit * max(1, np.abs(wanted).max())
        if round_ == 2:
            other.warm_up()
            del other
    assert engine.device == device


@pytest.mark.gpu
def test_a_device_that_is_full_fails_what_needs_more(bundle_dir: Path) -> None:
    """Other calls are answered as before; another model is opened when there is room again."""
    options = RuntimeOptions(device="cuda", num_threads=1)
    engine = Engine.open(bundle_dir, options)
    engine.warm_up()
    short = [EncoderInput(ids=[5] * 16, types=[0] * 16, task="fill-mask", rows=[0])]
    (before,) = engine.run_batch(short)
    length = engine.config.max_positions
    long = [EncoderInput(ids=[5] * length, types=[0] * length, task="fill-mask", rows=[0])]
    most = torch.empty(torch.cuda.mem_get_info()[0] - (8 << 20), dtype=torch.uint8, device="cuda")
    with pytest.raises(EngineError, match="runtime failed on ids"):
        engine.run_batch(long * (1_000_000 // length))
    assert np.array_equal(engine.run_batch(short)[0], before)
    del most
    torch.cuda.empty_cache()
    assert Engine.open(bundle_dir, options).device == "cuda"


class Driver:
    """An NVIDIA driver, as ctypes calls it."""

    def __init__(self, num_devices: int, version: int) -> None:
        self._num_devices = num_devices
        self._version = version

    def cuInit(self, _flags: int) -> int:  # noqa: N802
        return 0

    def cuDeviceGetCount(self, count: Any) -> None:  # noqa: N802
        count._obj.value = self._num_devices

    def cuDriverGetVersion(self, version: Any) -> None:  # noqa: N802
        version._obj.value = self._version


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Installs a driver, next to an onnxruntime with CUDA and its libraries."""

    def install(num_devices: int, version: int = 13_000) -> None:
        made = Driver(num_devices, version)
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, **_options: made)
        monkeypatch.setattr(ort, "get_available_providers", lambda: [cuda.PROVIDER])
        monkeypatch.setattr(ort, "preload_dlls", lambda **_: None)

    return install


def test_a_driver_without_a_device_or_of_an_old_cuda_is_a_reason(
    driver: Callable[..., None],
) -> None:
    for num_devices, version, reason in (
        (1, 13_000, None),
        (0, 13_000, "no device"),
        (1, 12_090, "CUDA 12.9, .* CUDA 13"),
    ):
        driver(num_devices, version)
        found = cuda.no_cuda_reason()
        assert found == reason or re.search(str(reason), str(found))


def test_workers_take_the_devices_in_turn_and_a_new_one_that_of_the_dead(
    driver: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = cuda.own_device.__wrapped__
    monkeypatch.setattr(cuda, "_LOCKS", [])
    driver(2)
    assert [device() for _ in range(2)] == [0, 0]  # outside of a service
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    assert [device() for _ in range(3)] == [0, 1, 0]
    cuda._LOCKS[1].release()
    assert device() == 1
    driver(1)
    assert device() == 0


TASKS: Final = {"fill-mask": 30000, "sentence-order": 2, "question-answering": 2}


def write_zeros(config: AlbertConfig, precision: Precision, file: Path) -> None:
    """A weight file of a precision with zeros that take no room on disk."""
    types = {"F32": 4, "F16": 2, "I8": 1}
    header, offset = {}, 0
    for name, shape in expected_shapes(config, TASKS).items():
        kept = precision == "fp32" or part_of(name) is None
        dtype = "F32" if kept else "F16" if precision == "fp16" else "I8"
        tensors = [(name, shape[::-1] if dtype == "I8" else shape, dtype)]
        if dtype == "I8":
            tensors.append((name + SCALE_SUFFIX, shape[:1], "F32"))
        for tensor, dims, kind in tensors:
            end = offset + int(np.prod(dims)) * types[kind]
            header[tensor] = {"dtype": kind, "shape": list(dims), "data_offsets": [offset, end]}
            offset = end
    text = json.dumps(header).encode()
    with file.open("wb") as output:
        output.write(struct.pack("<Q", len(text)) + text)
        output.truncate(8 + len(text) + offset)


def place(graph: Path) -> tuple[dict[str, Counter[str]], list[str]]:
    """The operators of each provider, and those of the optimised graph."""
    options = cuda_options()
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    options.optimized_model_filepath = str(graph.with_suffix(".placed"))
    session = open_session(graph, options, cuda=cuda_provider())
    operators: dict[str, Counter[str]] = defaultdict(Counter)
    for part in session.get_provider_graph_assignment_info():
        operators[part.ep_name].update(node.op_type for node in part.get_nodes())
    placed = onnx.load(graph.with_suffix(".placed"), load_external_data=False)
    return operators, [node.op_type for node in placed.graph.node]


@pytest.mark.gpu
@pytest.mark.parametrize("compute", get_args(Compute))
@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("size", ["base", "xlarge"])  # heads of 64 and of 128
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
        operators, nodes = place(tmp_path / f"{name}.onnx")
        # The shape of the hidden states: three numbers, which the CPU needs.
        on_cpu = Counter({"Concat": 1} if name == "encoder" else {})
        assert operators["CPUExecutionProvider"] == on_cpu
        assert not [op for op in nodes if op.startswith("Memcpy")]
        assert "DequantizeLinear" not in nodes  # folded
        is_int8_encoder = (precision, name) == ("int8", "encoder")
        assert nodes.count("Transpose") == is_int8_encoder  # of the gathered words
        assert nodes.count("Cast") <= (3 if name == "encoder" else 0)
