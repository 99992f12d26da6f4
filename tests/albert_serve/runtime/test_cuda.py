"""The real CUDA provider over emulated libraries: when it is used, and what it is given to run.

The emulation computes nothing. What these tests do not show is numbers, speed, and whether a real
driver agrees.
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

import numpy as np
import onnx
import pytest
from filelock import FileLock

from albert_serve.bundle.manifest import Precision
from albert_serve.bundle.weights import SCALE_SUFFIX, expected_shapes, read_header
from albert_serve.config import AlbertConfig, preset
from albert_serve.settings import METRICS_VARIABLE
from export.encoder import build_encoder
from export.graph import CUDA_FORM, Compute
from export.heads import build_head
from export.precision import part_of
from tests import emulated_cuda
from tests.programs import needs_program

pytestmark = pytest.mark.slow

_OPEN: Final = """
import json, logging, sys
from pathlib import Path
from albert_serve.errors import EngineError
from albert_serve.runtime.engine import Engine
from albert_serve.settings import RuntimeOptions

lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append([record.levelno, record.getMessage()])
logging.getLogger("albert_serve").addHandler(handler)
logging.getLogger("albert_serve").setLevel(logging.INFO)
try:
    engine = Engine.open(Path(sys.argv[1]), RuntimeOptions(device=sys.argv[2], num_threads=1))
    engine.warm_up()
    device = engine.device
except EngineError as error:
    device = str(error)
print(json.dumps([device, lines]))
"""


@pytest.fixture(scope="session")
def emulation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if reason := emulated_cuda.missing():
        pytest.skip(reason)
    for compiler in ("gcc", "g++"):
        needs_program(compiler)
    folder = tmp_path_factory.mktemp("emulated-cuda")
    emulated_cuda.build(folder)
    return folder


def test_a_device_is_used(emulation: Path, bundle_dir: Path) -> None:
    for device in ("auto", "cuda"):
        outcome = emulated_cuda.run(emulation, _OPEN, str(bundle_dir), device)
        assert outcome.result == ["cuda", []]
        assert outcome.errors == ""
    outcome = emulated_cuda.run(emulation, _OPEN, str(bundle_dir), "cpu")
    assert outcome.result == ["cpu", []]
    assert outcome.log == []


def test_workers_take_all_devices_in_turn(
    emulation: Path, bundle_dir: Path, tmp_path: Path
) -> None:
    """One that is killed leaves its place to the next."""
    variables = {"EMULATED_DEVICES": "2", METRICS_VARIABLE: str(tmp_path)}
    with ExitStack() as held:
        for number in (0, 1, 0):
            outcome = emulated_cuda.run(
                emulation, _OPEN, str(bundle_dir), "cuda", variables=variables
            )
            assert outcome.result == ["cuda", []]
            assert ("cudaSetDevice 1" in outcome.log) == (number == 1)
            place = len(list(tmp_path.iterdir())) - 1
            held.enter_context(FileLock(tmp_path / f"cuda-place-{place}.lock", blocking=False))


_LIMITED: Final = """
import json, sys
from pathlib import Path
from albert_serve.errors import EngineError
from albert_serve.runtime.engine import Engine
from albert_serve.settings import RuntimeOptions
from albert_serve.tasks.base import EncoderInput

options = RuntimeOptions(device="cuda", num_threads=1, gpu_mem_limit=8 << 20)
engine = Engine.open(Path(sys.argv[1]), options)
answered = []
for size in (1, 120, 1):
    try:
        item = EncoderInput(ids=[5] * 128, types=[0] * 128, task="fill-mask", rows=[0])
        engine.run_batch([item] * size)
        answered.append("")
    except EngineError as error:
        answered.append(str(error))
print(json.dumps(answered))
"""


def test_an_encoder_keeps_to_its_memory(emulation: Path, bundle_dir: Path) -> None:
    """What needs more fails alone."""
    small, large, again = emulated_cuda.run(emulation, _LIMITED, str(bundle_dir)).result
    assert (small, again) == ("", "")
    assert "Available memory" in large


_CUDA_LIBRARIES: Final = tuple(emulated_cuda.LIBRARIES.keys() - {"libcuda.so.1"})


@pytest.mark.parametrize(
    ("without", "variables", "reason"),
    [
        pytest.param(_CUDA_LIBRARIES, {}, "libcublas", id="driver-without-cuda"),
        pytest.param(("libcurand.so.10",), {}, "libcurand.so.10", id="one-library-missing"),
        pytest.param((), {"EMULATED_DRIVER": "12040"}, "supports CUDA 12.4", id="old-driver"),
        pytest.param((), {"EMULATED_DEVICES": "0"}, "finds no device", id="no-device"),
        pytest.param(
            (), {"EMULATED_ERROR": "35"}, "CUDA failure 35: an emul", id="a-device-that-fails"
        ),
    ],
)
def test_auto_serves_on_the_cpu_where_cuda_cannot_be_used(
    without: tuple[str, ...],
    variables: dict[str, str],
    reason: str,
    emulation: Path,
    bundle_dir: Path,
) -> None:
    bundle = str(bundle_dir)
    outcome = emulated_cuda.run(
        emulation, _OPEN, bundle, "auto", without=without, variables=variables
    )
    device, ((level, line),) = outcome.result
    assert (device, level) == ("cpu", logging.WARNING)
    assert line.startswith("running on the CPU: ")
    assert reason in line
    assert "make serve-gpu, or pip install 'albert-serve[gpu]'" in line
    assert len(line) < 400
    assert "\n" not in line
    assert outcome.errors == ""

    outcome = emulated_cuda.run(
        emulation, _OPEN, bundle, "cuda", without=without, variables=variables
    )
    message, lines = outcome.result
    assert message.startswith("CUDA is asked for and cannot be used: ")
    assert reason in message
    assert lines == []


_PLACE: Final = """
import collections, json, sys
from pathlib import Path
import onnx
from albert_serve.runtime.cuda import cuda_provider
from albert_serve.runtime.ort import cuda_options, open_session

placed = {}
for file in map(Path, sys.argv[2:]):
    options = cuda_options()
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    options.optimized_model_filepath = str(file.with_suffix(".placed"))
    provider = cuda_provider(captures="encoder" in file.name)
    session = open_session(file, options, cuda=provider)
    parts = session.get_provider_graph_assignment_info()
    where = collections.defaultdict(collections.Counter)
    for part in parts:
        where[part.ep_name].update(node.op_type for node in part.get_nodes())
    graph = onnx.load(file.with_suffix(".placed"), load_external_data=False).graph
    file.with_suffix(".placed").unlink()
    placed[file.name] = [where, [node.op_type for node in graph.node]]
print(json.dumps(placed))
"""
SIZES: Final = ("base", "large", "xlarge", "xxlarge")
TASKS: Final[dict[str, int]] = {
    "fill-mask": 30000,
    "sentence-order": 2,
    "question-answering": 2,
}


def write_zeros(
    config: AlbertConfig,
    precision: Precision,
    file: Path,
    tasks: Mapping[str, int] = TASKS,
) -> None:
    """A weight file of a precision with zeros that take no room on disk."""
    types = {"F32": 4, "F16": 2, "I8": 1}
    header, offset = {}, 0
    for name, shape in expected_shapes(config, tasks).items():
        kept = precision == "fp32" or part_of(name) is None
        dtype = "F32" if kept else "F16" if precision == "fp16" else "I8"
        tensors = [(name, shape[::-1] if dtype == "I8" else shape, dtype)]
        if dtype == "I8":
            tensors.append((name + SCALE_SUFFIX, shape[:1], "F32"))
        for each, dims, kind in tensors:
            end = offset + int(np.prod(dims)) * types[kind]
            header[each] = {"dtype": kind, "shape": list(dims), "data_offsets": [offset, end]}
            offset = end
    text = json.dumps(header).encode()
    with file.open("wb") as output:
        output.write(struct.pack("<Q", len(text)) + text)
        output.truncate(8 + len(text) + offset)


@pytest.mark.parametrize("compute", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("size", SIZES)
def test_every_node_has_a_cuda_kernel(
    size: str, precision: Precision, compute: Compute, emulation: Path, tmp_path: Path
) -> None:
    config = preset(size)
    write_zeros(config, precision, tmp_path / "model.safetensors")
    stored = read_header(tmp_path / "model.safetensors")
    form = replace(CUDA_FORM, compute=compute)
    graphs = {"encoder": build_encoder(config, stored, form)}
    for task, num_outputs in TASKS.items():
        graphs[task] = build_head(config, task, num_outputs, stored, form)
    for name, model in graphs.items():
        onnx.save(model, tmp_path / f"{name}.onnx")

    files = [str(tmp_path / f"{name}.onnx") for name in graphs]
    outcome = emulated_cuda.run(emulation, _PLACE, str(tmp_path), *files)

    assert outcome.errors == ""
    for name, (where, nodes) in outcome.result.items():
        on_cpu = where.get("CPUExecutionProvider", {})
        # The shape of the hidden states: three numbers, which the CPU needs.
        assert on_cpu == ({"Concat": 1} if name == "encoder.onnx" else {})
        assert not [op for op in nodes if op.startswith("Memcpy")]
        assert "DequantizeLinear" not in nodes  # folded
        is_int8_encoder = (precision, name) == ("int8", "encoder.onnx")
        assert nodes.count("Transpose") == is_int8_encoder  # of the gathered words
        assert nodes.count("Cast") <= (3 if name == "encoder.onnx" else 0)


_RUN: Final = """
import ctypes, json, sys
from pathlib import Path
import numpy as np
from albert_serve.bundle.manifest import Bundle
from albert_serve.config import AlbertConfig
from albert_serve.runtime.cuda import cuda_provider
from albert_serve.runtime.encoders import BucketedEncoder, PaddedBatch
from albert_serve.runtime.ort import cuda_options, open_session

runtime = ctypes.CDLL("libcudart.so.13")
runtime.emulated_in_use.restype = ctypes.c_size_t
config = AlbertConfig(**json.loads(sys.argv[2]))
session = open_session(Path(sys.argv[1]), cuda_options(), cuda=cuda_provider(captures=True))
encoder = BucketedEncoder(session, config)
in_use = []
for rows, length in json.loads(sys.argv[3]):
    runtime.emulated_mark(f"RUN {rows}x{length}".encode())
    ids = np.ones((rows, length), np.int64)
    encoder.run(PaddedBatch(ids=ids, types=ids, lengths=np.full(rows, length)))
    in_use.append(runtime.emulated_in_use())
runtime.emulated_mark(b"END")
print(json.dumps(in_use))
"""


def run_shapes(
    emulation: Path,
    folder: Path,
    size: str,
    shapes: list[tuple[int, int]],
    compute: Compute = "fp16",
    sm: int = 90,
) -> tuple[list[int], dict[str, list[str]]]:
    """Device memory after each run, and what each run did."""
    config = preset(size)
    write_zeros(config, "fp32", folder / "model.safetensors")
    form = replace(CUDA_FORM, compute=compute)
    model = build_encoder(config, read_header(folder / "model.safetensors"), form)
    onnx.save(model, folder / "encoder.onnx")
    outcome = emulated_cuda.run(
        emulation,
        _RUN,
        str(folder / "encoder.onnx"),
        json.dumps(asdict(config)),
        json.dumps(shapes),
        variables={"EMULATED_SM": str(sm)},
    )
    runs: dict[str, list[str]] = {}
    for line in outcome.log[: outcome.log.index("END")]:
        if line.startswith("RUN"):
            runs[f"{len(runs)}: {line[4:]}"] = current = []
        elif runs:
            current.append(line)
    return outcome.result, runs


@pytest.mark.parametrize("size", ["base", "xlarge"])
@pytest.mark.parametrize("compute", ["fp16", "bf16", "fp32"])
def test_small_batches_are_captured_and_replayed(
    size: str, compute: Compute, emulation: Path, tmp_path: Path
) -> None:
    shapes = [(2, 40), (1, 512), (1, 60), (2, 64), (33, 480), (1, 500), (33, 480)]
    _, runs = run_shapes(emulation, tmp_path, size, shapes, compute)
    first, second, third, again, large, replayed, large_again = runs.values()
    for captured in (first, second, third):
        assert captured.count("cudaGraphInstantiate") == 1
        kernels = [line for line in captured if line.startswith("CAPTURED")]
        assert len(kernels) > 100
        assert not [line for line in kernels if "host" in line or "cudaMalloc" in line]
        assert not [line for line in captured if "SPOILT" in line]
    for replay in (again, replayed):
        assert [line for line in replay if "cudaMemcpy" not in line] == ["cudaGraphLaunch"]
    for uncaptured in (large, large_again):
        assert not [line for line in uncaptured if "Graph" in line or "CAPTURED" in line]


@pytest.mark.parametrize("sm", [75, 80, 86, 89, 90, 120])
@pytest.mark.parametrize("size", ["base", "xlarge"])  # heads of 64 and of 128
def test_attention_has_a_flash_kernel(size: str, sm: int, emulation: Path, tmp_path: Path) -> None:
    _, runs = run_shapes(emulation, tmp_path, size, [(1, 32), (4, 384), (33, 480)], sm=sm)
    kernel = "AttentionKernelIN7cutlass" if sm == 75 else "flash_fwd_kernel"
    for launches in runs.values():
        assert [line for line in launches if kernel in line]
        assert not [line for line in launches if "oftmax" in line and kernel not in line]


def test_memory_of_all_shapes_is_bounded(emulation: Path, tmp_path: Path) -> None:
    """With an output of each shape's own, 122 shapes took 4.5 GiB."""
    lengths, sizes = range(32, 513, 32), [1 << power for power in range(8)]
    captured = [(rows, length) for length in lengths for rows in sizes if rows * length <= 4096]
    assert len(captured) == 79
    in_use, runs = run_shapes(emulation, tmp_path, "base", captured)
    assert [run.count("cudaGraphInstantiate") for run in runs.values()] == [1] * len(captured)
    weights = 2 * 11_100_000
    widest = 4096 * (3 * 768 + 3072 + 2 * 768) * 4
    assert in_use[-1] < 3 * (weights + widest) < 500 << 20


_LOAD_AND_SERVE: Final = """
import gc, json, sys, threading
from pathlib import Path
from albert_serve.runtime.engine import Engine
from albert_serve.settings import RuntimeOptions
from albert_serve.tasks.base import EncoderInput

bundle = Path(sys.argv[1])
options = RuntimeOptions(device="cuda", num_threads=1)
engine = Engine.open(bundle, options)
engine.warm_up()

def call(seed):
    for i in range(40):
        n = 3 + (37 * i + seed) % 120
        item = EncoderInput(ids=[5] * n, types=[0] * n, task="fill-mask", rows=[0])
        engine.run([item] * (1 + i % 5))

threads = [threading.Thread(target=call, args=(seed,)) for seed in range(2)]
for thread in threads:
    thread.start()
for _ in range(3):  # as a reload does
    other = Engine.open(bundle, options)
    other.warm_up()
    del other
    gc.collect()
for thread in threads:
    thread.join()
print(json.dumps(engine.device))
"""


def test_a_model_that_is_loaded_spoils_no_capture(emulation: Path, bundle_dir: Path) -> None:
    """With calls on the threads that make them, the emulation tells of captures that are spoilt."""
    outcome = emulated_cuda.run(emulation, _LOAD_AND_SERVE, str(bundle_dir))
    assert outcome.result == "cuda"
    assert sum(line == "cudaGraphInstantiate" for line in outcome.log) > 10
    assert not [line for line in outcome.log if "SPOILT" in line]
    # The models that went were freed.
    assert "cudaGraphExecDestroy" in outcome.log
