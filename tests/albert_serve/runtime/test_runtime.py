"""ONNX Runtime's options, the packed weights on disk, and the device that is chosen."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import re
import shutil
import threading
import tomllib
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import onnxruntime as ort
import pytest
import torch

from albert_serve.bundle.manifest import Bundle
from albert_serve.config import preset
from albert_serve.errors import BundleCorruptError, EngineError, InvalidInputError
from albert_serve.runtime import engine as engine_module
from albert_serve.runtime import ort as runtime
from albert_serve.runtime import prepacking
from albert_serve.runtime.cuda import NO_DRIVER, no_cuda_reason
from albert_serve.runtime.encoder_pool import EncoderPool, OpenEncoder, best_batch_tokens
from albert_serve.runtime.encoders import BucketedEncoder, CpuEncoder, PaddedBatch, bucket_shape
from albert_serve.runtime.engine import Engine
from albert_serve.runtime.ort import (
    check_runtime,
    cpu_name,
    encoder_options,
    head_options,
    open_session,
)
from albert_serve.runtime.prepacking import packed_encoder
from albert_serve.settings import Device, RuntimeOptions
from albert_serve.tasks.base import EncoderInput
from export.write import export_bundle
from tests.albert_serve.support import ROOT
from tests.export.exporting import TINY, write_checkpoint
from training.model.albert import Batch


@pytest.fixture
def options(tmp_path: Path) -> RuntimeOptions:
    return RuntimeOptions(
        device="cpu", num_threads=1, prepack="cache", cache_folder=tmp_path / "cache"
    )


@pytest.fixture(scope="module")
def int8_dir(checkpoint_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("bundles") / "int8"
    return export_bundle(checkpoint_dir, target, precision="int8").bundle.folder


def entries(options: RuntimeOptions) -> list[Path]:
    assert options.cache_folder is not None
    return sorted(each for each in options.cache_folder.iterdir() if each.name != ".lock")


def some_inputs(tasks: Sequence[str], seed: int = 0) -> list[EncoderInput]:
    generator = np.random.default_rng(seed)
    return [
        EncoderInput(
            ids=generator.integers(5, 1000, n).tolist(), types=[0] * n, task=task, rows=[0]
        )
        for n, task in zip((3, 40, 17, 90, 1, 64), list(tasks) * 3, strict=False)
    ]


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_packed_weights_on_disk_give_the_same_numbers(
    bundle_dir: Path, int8_dir: Path, options: RuntimeOptions, precision: str
) -> None:
    bundle = Bundle.open(bundle_dir if precision == "fp32" else int8_dir)
    in_memory = Engine.open(bundle, RuntimeOptions(device="cpu", num_threads=1))
    inputs = some_inputs(in_memory.tasks)
    expected = in_memory.run(inputs)
    for _ in range(2):  # made, then found
        got = Engine.open(bundle, options).run(inputs)
        for one, other in zip(expected, got, strict=True):
            np.testing.assert_array_equal(one, other)
    assert len(entries(options)) == 1


def test_an_entry_is_made_once(bundle_dir: Path, options: RuntimeOptions) -> None:
    bundle = Bundle.open(bundle_dir)
    first = packed_encoder(bundle, options)
    assert first is not None
    made_ns = first.stat().st_mtime_ns
    assert packed_encoder(bundle, options) == first
    assert first.stat().st_mtime_ns == made_ns


@pytest.mark.parametrize("file", ["encoder.onnx", "encoder.data", "entry.json"])
@pytest.mark.parametrize("damage", ["truncated", "changed", "gone"])
def test_a_damaged_entry_is_made_anew(
    bundle_dir: Path, options: RuntimeOptions, file: str, damage: str
) -> None:
    bundle = Bundle.open(bundle_dir)
    packed = packed_encoder(bundle, options)
    assert packed is not None
    victim = packed.parent / file
    content = victim.read_bytes()
    if damage == "gone":
        victim.unlink()
    elif damage == "truncated":
        victim.write_bytes(content[:-1])
    else:
        victim.write_bytes(content[:-20] + b"x" + content[-19:])

    assert packed_encoder(bundle, options) == packed

    assert victim.stat().st_size == len(content)
    Engine.open(bundle, options).warm_up()


def test_another_runtimes_entry_is_replaced(
    bundle_dir: Path, options: RuntimeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = Bundle.open(bundle_dir)
    old = packed_encoder(bundle, options)
    monkeypatch.setattr(prepacking, "cpu_name", lambda: "another processor")
    new = packed_encoder(bundle, options)
    assert new is not None
    assert new != old
    assert entries(options) == [new.parent]


def test_another_bundles_entry_is_kept(
    bundle_dir: Path, int8_dir: Path, options: RuntimeOptions
) -> None:
    for folder in (bundle_dir, int8_dir):
        packed_encoder(Bundle.open(folder), options)
    assert len(entries(options)) == 2


@pytest.mark.parametrize("obstacle", ["a file", "no space"])
def test_a_cache_that_cannot_be_written_is_done_without(
    bundle_dir: Path,
    options: RuntimeOptions,
    obstacle: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert options.cache_folder is not None
    if obstacle == "a file":
        options.cache_folder.write_text("")
    else:
        monkeypatch.setattr(prepacking, "file_entry", fail_for_space)
    engine = Engine.open(Bundle.open(bundle_dir), options)
    engine.warm_up()
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "no packed weights are kept in" in record.getMessage()
    if obstacle == "no space":
        assert entries(options) == []


def fail_for_space(file: Path) -> None:
    raise OSError(28, "No space left on device")


def test_processes_that_start_together_make_one_entry(
    bundle_dir: Path, options: RuntimeOptions
) -> None:
    bundle = Bundle.open(bundle_dir)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(3, mp_context=context) as pool:
        graphs = set(pool.map(packed_encoder, [bundle] * 3, [options] * 3))
    assert len(graphs) == 1
    assert len(entries(options)) == 1


def test_packed_weights_are_mapped_and_not_copied(
    bundle_dir: Path, options: RuntimeOptions
) -> None:
    engine = Engine.open(Bundle.open(bundle_dir), options)
    engine.warm_up()
    mapped = Path("/proc/self/maps").read_text()
    assert re.search(rf"{options.cache_folder}/\w+/encoder\.data", mapped)
    # Encoder and heads look words up in the same pages.
    assert str(bundle_dir / "model.safetensors") in mapped


@pytest.mark.parametrize("prepack", ["memory", "none"])
def test_without_packing_the_numbers_are_nearly_the_same(bundle_dir: Path, prepack: str) -> None:
    bundle = Bundle.open(bundle_dir)
    one = Engine.open(bundle, RuntimeOptions(num_threads=1))
    other = Engine.open(bundle, RuntimeOptions(num_threads=1, prepack="none", spinning=False))
    inputs = some_inputs(one.tasks)
    for expected, got in zip(one.run(inputs), other.run(inputs), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-4)


def test_batches_beside_each_other_give_the_same_numbers(
    bundle_dir: Path, options: RuntimeOptions
) -> None:
    bundle = Bundle.open(bundle_dir)
    one = Engine.open(bundle, RuntimeOptions(num_threads=1))
    several = Engine.open(bundle, replace(options, num_threads=3))
    several.max_batch_tokens = one.max_batch_tokens = 64
    inputs = some_inputs(one.tasks) * 4
    for expected, got in zip(one.run(inputs), several.run(inputs), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)
    with pytest.raises(InvalidInputError, match="an input of 0 tokens"):
        several.run([*inputs, EncoderInput(ids=[], types=[], task=one.tasks[0], rows=[])])
    assert len(several.run(inputs)) == len(inputs)


@pytest.mark.parametrize(("exact", "num_warnings"), [(False, 1), (True, 0)])
def test_an_int8_bundle_warns_where_products_saturate(
    int8_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    exact: bool,
    num_warnings: int,
) -> None:
    monkeypatch.setattr("albert_serve.runtime.engine.has_dot_products", lambda: exact)
    caplog.set_level(logging.WARNING, "albert_serve")
    Engine.open(int8_dir, RuntimeOptions(num_threads=1, device="cpu"))
    warnings = [record for record in caplog.records if "serve the fp32 bundle" in record.message]
    assert len(warnings) == num_warnings


def test_int8_answers_do_not_depend_on_the_texts_beside_them(int8_dir: Path) -> None:
    engine = Engine.open(int8_dir, RuntimeOptions(num_threads=1))
    inputs = some_inputs(engine.tasks)
    inputs += [EncoderInput(ids=[999] * 16, types=[1] * 16, task=engine.tasks[0], rows=[0])]
    together = engine.run(inputs)
    for given, expected in zip(inputs, together, strict=True):
        np.testing.assert_array_equal(engine.run([given])[0], expected)


def test_the_fusion_that_is_slower_does_not_happen(bundle_dir: Path, tmp_path: Path) -> None:
    made = encoder_options(RuntimeOptions(num_threads=1))
    made.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    open_session(bundle_dir / "encoder.onnx", made)
    optimized = (tmp_path / "optimized.onnx").read_bytes()
    assert b"SkipLayerNormalization" not in optimized
    assert b"LayerNormalization" in optimized
    assert b"FastGelu" in optimized


def test_buckets_give_the_numbers_of_the_exact_shape(bundle_dir: Path) -> None:
    bundle = Bundle.open(bundle_dir)
    session = open_session(bundle.encoder_file, encoder_options(RuntimeOptions(num_threads=1)))
    exact = CpuEncoder(session=session)
    bucketed = BucketedEncoder(session, bundle.config, device="cpu")
    generator = np.random.default_rng(0)
    shapes = ((1, 3), (3, 40), (2, 33), (5, 8), (1, 3), (3, 97), (40, 100), (1, 128))
    for shape in shapes:
        lengths = generator.integers(1, shape[1] + 1, shape[0])
        lengths[0] = shape[1]
        batch = PaddedBatch(
            ids=generator.integers(5, 1000, shape), types=np.zeros(shape, np.int64), lengths=lengths
        )
        expected, got = exact.run(batch).numpy(), bucketed.run(batch).numpy()
        assert got.shape[:2] == (bucket_shape(*shape, max_positions=128) or shape)
        for row, length in enumerate(lengths):
            np.testing.assert_allclose(got[row, :length], expected[row, :length], atol=1e-5)


def test_an_engine_runs_on_buckets(bundle_dir: Path) -> None:
    """What a CUDA device does, but for the device."""
    bundle = Bundle.open(bundle_dir)
    reference = Engine.open(bundle, RuntimeOptions(num_threads=1))
    session = open_session(bundle.encoder_file, encoder_options(RuntimeOptions(num_threads=1)))
    heads = {
        str(t): open_session(bundle.head_file(t), head_options()) for t in bundle.manifest.tasks
    }
    encoder = BucketedEncoder(session, bundle.config, device="cpu")
    opened = OpenEncoder(encoder=encoder)
    engine = Engine(bundle.config, opened, heads, device="cuda")
    inputs = some_inputs(engine.tasks) * 3
    for expected, got in zip(reference.run(inputs), engine.run(inputs), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-4)


def test_buckets_end_at_the_position_table(tmp_path: Path) -> None:
    """With 100 positions 97 tokens were padded to 128, past the table."""
    config = replace(TINY, max_positions=100)
    model = write_checkpoint(tmp_path / "checkpoint", config, tasks=()).eval()
    bundle = export_bundle(tmp_path / "checkpoint", tmp_path / "bundle").bundle
    session = open_session(bundle.encoder_file, encoder_options(RuntimeOptions(num_threads=1)))
    ids = np.arange(97)[None] % config.vocab_size
    batch = PaddedBatch(ids=ids, types=np.zeros_like(ids), lengths=np.array([97]))

    encoder = BucketedEncoder(session, config, device="cpu")
    hidden = encoder.run(batch).numpy()

    assert hidden.shape[:2] == (1, 100)
    with torch.inference_mode():
        expected = model(
            Batch(ids=torch.from_numpy(ids), types=torch.zeros(1, 97, dtype=torch.long))
        ).numpy()
    np.testing.assert_allclose(hidden[:, :97], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((1, 1), (1, 32)),
        ((1, 32), (1, 32)),
        ((2, 33), (2, 64)),
        ((3, 512), (4, 512)),
        ((1, 600), (1, 640)),
        ((1, 700), (1, 700)),
        ((65, 32), (128, 32)),
        ((129, 32), None),
        ((33, 480), None),
        ((9, 300), None),
    ],
)
def test_bucket_shapes(shape: tuple[int, int], expected: tuple[int, int] | None) -> None:
    assert bucket_shape(*shape, max_positions=700) == expected


@pytest.mark.parametrize(("max_positions", "most"), [(100, 27), (512, 79), (4096, 160)])
def test_the_number_and_size_of_buckets_are_bounded(max_positions: int, most: int) -> None:
    shapes = {
        bucket_shape(num_sequences, num_positions, max_positions)
        for num_positions in range(1, max_positions + 1)
        for num_sequences in range(1, 4096 // num_positions + 2)
    } - {None}
    assert len(shapes) <= most
    assert all(shape and shape[0] * shape[1] <= 4096 for shape in shapes)


def test_several_shapes_are_run_before_the_first_request(bundle_dir: Path) -> None:
    bundle = Bundle.open(bundle_dir)
    session = open_session(bundle.encoder_file, encoder_options(RuntimeOptions(num_threads=1)))
    encoder = BucketedEncoder(session, bundle.config, device="cpu")
    head = {"fill-mask": open_session(bundle.head_file("fill-mask"), head_options())}
    Engine(bundle.config, OpenEncoder(encoder=encoder), head, device="cuda").warm_up()
    of_both_tasks = (2, 32)
    shapes = {(n, s) for n in (1, 4) for s in (32, 64, 128)}
    assert encoder._held.buckets.keys() == shapes | {of_both_tasks}


def test_all_calls_of_a_device_are_made_on_one_thread(bundle_dir: Path) -> None:
    """A captured graph belongs to the thread that captured it: warm-up's, and the queue's."""
    bundle = Bundle.open(bundle_dir)
    names = set()

    class Recorded(BucketedEncoder):
        def run(self, batch: PaddedBatch) -> ort.OrtValue:
            names.add(threading.current_thread().name)
            return super().run(batch)

    session = open_session(bundle.encoder_file, encoder_options(RuntimeOptions(num_threads=1)))
    opened = OpenEncoder(encoder=Recorded(session, bundle.config, device="cpu"))
    head = {"fill-mask": open_session(bundle.head_file("fill-mask"), head_options())}
    engine = Engine(bundle.config, opened, head, device="cuda")
    inputs = some_inputs(["fill-mask"])
    expected = engine.run(inputs)
    with ThreadPoolExecutor(4) as threads:
        for answers in threads.map(engine.run, [inputs] * 8):
            for one, other in zip(expected, answers, strict=True):
                np.testing.assert_array_equal(one, other)
    assert len(names) == 1


@pytest.mark.parametrize(
    ("size", "expected"), [("base", 512), ("large", 512), ("xlarge", 256), ("xxlarge", 128)]
)
def test_larger_models_have_smaller_batches(size: str, expected: int) -> None:
    assert best_batch_tokens(preset(size), "cpu") == expected


@pytest.fixture
def forgotten_reasons() -> None:
    """No reason was logged yet in this process."""
    engine_module._log_reason.cache_clear()


def open_logged(
    bundle: Path, device: Device, caplog: pytest.LogCaptureFixture
) -> tuple[Engine, list[tuple[int, str]]]:
    caplog.clear()
    caplog.set_level(logging.INFO, "albert_serve")
    opened = Engine.open(bundle, RuntimeOptions(num_threads=1, device=device))
    return opened, [(record.levelno, record.getMessage()) for record in caplog.records]


@pytest.mark.usefixtures("forgotten_reasons")
def test_without_a_driver_one_line_says_so(
    bundle_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if no_cuda_reason() != NO_DRIVER:
        pytest.skip("there is an NVIDIA driver here")
    expected = [(logging.INFO, "running on the CPU: no NVIDIA driver is installed")]
    engine, lines = open_logged(bundle_dir, "auto", caplog)
    assert (engine.device, lines) == ("cpu", expected)
    assert open_logged(bundle_dir, "auto", caplog)[1] == []  # said once
    assert open_logged(bundle_dir, "cpu", caplog)[1] == []


@pytest.mark.usefixtures("forgotten_reasons")
@pytest.mark.parametrize("fault", ["no library", "no session", "no run"])
def test_auto_serves_on_the_cpu_where_cuda_fails(
    bundle_dir: Path, fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reason = "a library of CUDA is missing: libcublas" if fault == "no library" else None
    monkeypatch.setattr(engine_module, "no_cuda_reason", lambda: reason)
    if fault == "no run":
        monkeypatch.setattr(engine_module.Engine, "_open_on", open_on_a_device_that_fails)

    engine, lines = open_logged(bundle_dir, "auto", caplog)

    assert engine.device == "cpu"
    engine.warm_up()
    ((level, line),) = lines
    assert level == logging.WARNING
    assert line.startswith("running on the CPU: ")
    assert "make serve-gpu, or pip install '.[gpu]' in the checkout" in line
    assert {"no library": "libcublas", "no session": "without CUDA", "no run": "no kernel image"}[
        fault
    ] in line
    with pytest.raises(EngineError, match=r"CUDA is asked for and cannot be used: .*serve-gpu"):
        Engine.open(bundle_dir, RuntimeOptions(device="cuda"))


def open_on_a_device_that_fails(
    device: str, bundle: Bundle, options: RuntimeOptions, pool: EncoderPool
) -> Engine:
    engine = _OPEN_ON("cpu", bundle, options, pool)
    if device == "cuda":
        engine._encoder = OpenEncoder(encoder=FailingEncoder())
    return engine


_OPEN_ON = Engine._open_on


class FailingEncoder:
    first_shapes: ClassVar[list[tuple[int, int]]] = []

    def run(self, batch: PaddedBatch) -> ort.OrtValue:
        raise RuntimeError("no kernel image is available for execution on the device")


def test_an_old_runtime_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort, "__version__", "1.30.2")
    with pytest.raises(EngineError, match=r"onnxruntime 1\.30\.2 .*1\.31 or newer is needed"):
        check_runtime()


def test_a_graph_of_a_newer_opset_is_refused(bundle_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "newer"
    shutil.copytree(bundle_dir, folder)
    graph = (folder / "encoder.onnx").read_bytes()
    # opset_import {version: 24} of the default domain
    newer = graph.replace(b"\x10\x18", b"\x10\x7f")
    assert newer != graph
    (folder / "encoder.onnx").write_bytes(newer)
    with pytest.raises(BundleCorruptError, match=f"onnxruntime {re.escape(ort.__version__)}"):
        open_session(folder / "encoder.onnx", encoder_options(RuntimeOptions(num_threads=1)))


def test_the_processor_is_named() -> None:
    name = cpu_name()
    assert name.strip()
    assert name == " ".join(name.split())
    if os.uname().machine == "x86_64":
        assert "avx" in name


def test_no_dot_products_take_the_exact_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "cpu_flags", lambda: frozenset({"avx2"}))
    made = head_options()
    assert made.get_session_config_entry("session.x64quantprecision") == "1"


def test_an_entry_says_what_it_was_made_of(bundle_dir: Path, options: RuntimeOptions) -> None:
    bundle = Bundle.open(bundle_dir)
    packed = packed_encoder(bundle, options)
    assert packed is not None
    entry = json.loads((packed.parent / "entry.json").read_text())
    assert entry["weights"] == bundle.manifest.files["model.safetensors"].sha256
    assert (entry["runtime"], entry["cpu"]) == (ort.__version__, cpu_name())


def test_the_extra_for_gpus_pins_what_the_constraints_do() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = {line.split(";")[0] for line in extras["optional-dependencies"]["gpu"]}
    packages -= {"albert-serve[serve]"}
    constraints = (ROOT / "constraints.txt").read_text().split()
    assert {package.replace("[cuda,cudnn]", "") for package in packages} <= set(constraints)
    assert "onnxruntime-gpu[cuda,cudnn]==1.31.1" in packages
    assert {package for package in constraints if package.startswith("nvidia-")} <= packages
