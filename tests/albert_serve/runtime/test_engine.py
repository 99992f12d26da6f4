"""The engine: equality with torch, mixed batches, errors, memory, and prepacked weights."""

from __future__ import annotations

import logging
import multiprocessing
import random
import re
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from albert_serve.bundle.manifest import Bundle
from albert_serve.bundle.weights import read_header
from albert_serve.config import preset
from albert_serve.errors import EngineError, InvalidInputError, NotFoundError
from albert_serve.runtime import prepacking
from albert_serve.runtime.cuda import NO_DRIVER, no_cuda_reason
from albert_serve.runtime.encoders import best_batch_tokens
from albert_serve.runtime.engine import Engine
from albert_serve.runtime.ort import return_free_memory
from albert_serve.runtime.prepacking import packed_encoder
from albert_serve.server.models import num_anonymous_bytes
from albert_serve.settings import RuntimeOptions
from albert_serve.tasks import EncoderInput
from tests.albert_serve.batching.engines import some_inputs
from tests.albert_serve.support import TorchEngine

TASKS = ("fill-mask", "sentence-order", "text-classification", "question-answering")


@pytest.fixture(scope="module")
def engine(bundle_dir: Path) -> Engine:
    return Engine.open(bundle_dir, RuntimeOptions(num_threads=1))


@pytest.fixture
def options(tmp_path: Path) -> RuntimeOptions:
    """Options with an empty cache."""
    return RuntimeOptions(num_threads=1, cache_folder=tmp_path / "cache")


def make_input(
    task: str, num_tokens: int, rows: list[int] | None = None, seed: int = 0
) -> EncoderInput:
    generator = random.Random(f"{task} {num_tokens} {seed}")
    ids = [generator.randrange(1000) for _ in range(num_tokens)]
    types = [int(position > num_tokens // 2) for position in range(num_tokens)]
    return EncoderInput(ids=ids, types=types, task=task, rows=rows)


def mixed_inputs() -> list[EncoderInput]:
    """Return inputs of all tasks, lengths and kinds of rows, in random order."""
    lengths = [1, 2, 3, 31, 32, 33, 60, 64, 100, 127, 128]
    inputs = [
        make_input(task, length, rows=rows, seed=seed)
        for length in lengths
        for seed, task in enumerate(TASKS)
        for rows in ([0], [length - 1, 0], None, [])
    ]
    random.Random(0).shuffle(inputs)
    return inputs


def test_single_inputs_equal_torch_and_a_batch_of_mixed_inputs_equals_single_inputs(
    engine: Engine, torch_engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch may mix inputs of heads and of hidden states."""
    features = []
    for length in (1, 31, 100):
        for rows in ([0], None):
            plain = make_input("feature-extraction", length, rows=rows)
            features += [replace(plain, reduction=kind) for kind in ("none", "mean", "max")]
    mixed = mixed_inputs()
    inputs = [item for pair in zip(features, mixed, strict=False) for item in pair]
    inputs += mixed[len(features) :]
    singles = [engine.run([item])[0] for item in inputs]
    for single, expected in zip(singles, torch_engine.run(inputs), strict=True):
        assert single.dtype == np.float32
        assert single.shape == expected.shape
        assert expected.shape[0] < 2 or np.ptp(expected) > 0.01  # similar logits would hide faults
        np.testing.assert_allclose(single, expected, rtol=0, atol=1e-4)
    monkeypatch.setattr(engine, "max_batch_tokens", 200)
    for run in (engine.run, engine.run_batch):
        for logits, single in zip(run(inputs), singles, strict=True):
            np.testing.assert_allclose(logits, single, rtol=0, atol=1e-5)


def test_threads_get_the_same_logits_as_single_calls(engine: Engine) -> None:
    inputs = mixed_inputs()[:40]
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda item: engine.run([item])[0], inputs))
    for item, logits in zip(inputs, results, strict=True):
        np.testing.assert_array_equal(logits, engine.run([item])[0])
    assert engine.run([]) == engine.run_batch([]) == []
    assert set(engine.tasks) == {*TASKS, "feature-extraction"}


def test_the_default_tokens_of_a_batch_are_as_documented() -> None:
    for size, num_tokens in {"base": 512, "large": 512, "xlarge": 256, "xxlarge": 128}.items():
        assert best_batch_tokens(preset(size), "cpu") == num_tokens
        assert best_batch_tokens(preset(size), "cuda") == 16_384


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"task": "translation"}, NotFoundError, "'translation'.* fill-mask, "),
        ({"ids": [0, 1000]}, InvalidInputError, "id 1000 .* 999"),
        ({"types": [0, 2]}, InvalidInputError, "token type 2 .* 1"),
        ({"rows": [-1, 1]}, InvalidInputError, "row -1 "),
        ({"rows": [0, 2]}, InvalidInputError, "row 2 "),
        ({"types": [0]}, InvalidInputError, "2 ids, but 1 "),
        ({"ids": [], "types": []}, InvalidInputError, "0 tokens.* 1 to 128"),
        ({"ids": [5] * 129, "types": [0] * 129}, InvalidInputError, "129 tokens.* 128"),
    ],
)
def test_an_invalid_input_is_an_error_with_its_value_and_the_allowed_values(
    engine: Engine, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    valid = EncoderInput(ids=[2, 3], types=[0, 0], task="fill-mask", rows=None)
    for run in (engine.run, engine.run_batch):
        with pytest.raises(error, match=message):
            run([valid, replace(valid, **changes)])


def test_nan_logits_are_an_error_of_their_task_only(bundle_dir: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(bundle_dir, tmp_path / "nan"))
    bias = read_header(folder / "model.safetensors")["classifier.bias"]
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(bias.offset)
        file.write(np.float32("nan").tobytes())
    engine = Engine.open(Bundle.open(folder, verify="size"), RuntimeOptions(num_threads=1))
    with pytest.raises(EngineError, match="text-classification are not finite"):
        engine.run([make_input("text-classification", 5, rows=[0])])
    assert len(engine.run([make_input("fill-mask", 5, rows=[0])])) == 1


def test_int8_logits_do_not_depend_on_the_batch(int8_dir: Path) -> None:
    engine = Engine.open(int8_dir, RuntimeOptions(num_threads=1))
    inputs = some_inputs(engine.tasks)
    inputs += [EncoderInput(ids=[999] * 16, types=[1] * 16, task=engine.tasks[0], rows=[0])]
    for item, logits in zip(inputs, engine.run(inputs), strict=True):
        np.testing.assert_array_equal(engine.run([item])[0], logits)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_memory_of_a_very_large_batch_is_freed(bundle_dir: Path) -> None:
    engine = Engine.open(bundle_dir, RuntimeOptions(num_threads=1))
    engine.warm_up()
    return_free_memory()
    old_bytes = num_anonymous_bytes() or 0
    engine.run_batch([make_input("fill-mask", 128, rows=[0])] * 400)  # 100 MB of attention scores
    return_free_memory()
    assert (num_anonymous_bytes() or 0) - old_bytes < 32 << 20


def test_without_a_driver_auto_uses_the_cpu_and_cuda_is_an_error(
    bundle_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if no_cuda_reason() != NO_DRIVER:
        pytest.skip("there is an NVIDIA driver here")
    caplog.set_level(logging.INFO, "albert_serve")
    assert Engine.open(bundle_dir, RuntimeOptions(num_threads=1, device="auto")).device == "cpu"
    assert caplog.messages == ["Running on the CPU. No NVIDIA driver is installed."]
    with pytest.raises(EngineError, match=r"CUDA .*No NVIDIA driver.*serve-gpu"):
        Engine.open(bundle_dir, RuntimeOptions(device="cuda"))


def count_entries(options: RuntimeOptions) -> int:
    """Count the models in the cache of prepacked weights."""
    assert options.cache_folder is not None
    return sum(path.name != ".lock" for path in options.cache_folder.iterdir())


def test_prepacked_weights_are_stored_once_mapped_and_give_the_same_logits(
    bundle_dir: Path, int8_dir: Path, options: RuntimeOptions
) -> None:
    for num_models, folder in enumerate((bundle_dir, int8_dir), start=1):
        in_memory = Engine.open(folder, RuntimeOptions(num_threads=1))
        for num_threads in (1, 3):
            packed = Engine.open(folder, replace(options, num_threads=num_threads))
            packed.max_batch_tokens = in_memory.max_batch_tokens = 64
            inputs = some_inputs(in_memory.tasks) * 4
            for expected, logits in zip(in_memory.run(inputs), packed.run(inputs), strict=True):
                np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)
            assert count_entries(options) == num_models
        mapped_files = Path("/proc/self/maps").read_text()
        assert re.search(rf"{options.cache_folder}/\w+/encoder\.data", mapped_files)
        # Encoder and heads share the word embeddings of the bundle.
        assert str(folder / "model.safetensors") in mapped_files


def test_each_runtime_and_processor_has_its_own_entry_and_a_damaged_entry_is_written_again(
    bundle_dir: Path, options: RuntimeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = Bundle.open(bundle_dir)
    packed = packed_encoder(bundle, options)
    assert packed is not None
    file = packed.parent / "encoder.data"
    content = file.read_bytes()
    for damaged in (content[:-1], content[:-20] + b"x" + content[-19:], None):
        file.unlink()
        if damaged is not None:
            file.write_bytes(damaged)
        assert packed_encoder(bundle, options) == packed
        assert file.read_bytes() == content
    monkeypatch.setattr(ort, "__version__", "1.99.0")
    packed_encoder(bundle, options)
    assert count_entries(options) == 2
    monkeypatch.setattr(prepacking, "cpu_name", lambda: "another")
    packed_encoder(bundle, options)
    assert count_entries(options) == 3


def test_a_cache_that_cannot_be_written_is_only_a_warning(
    bundle_dir: Path, options: RuntimeOptions, caplog: pytest.LogCaptureFixture
) -> None:
    assert options.cache_folder is not None
    options.cache_folder.write_text("")
    engine = Engine.open(Bundle.open(bundle_dir), options)
    engine.warm_up()
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "packed weights cannot be stored in" in record.getMessage()


@pytest.mark.process
def test_concurrent_processes_store_one_entry(bundle_dir: Path, options: RuntimeOptions) -> None:
    bundle = Bundle.open(bundle_dir)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(3, mp_context=context) as pool:
        graphs = set(pool.map(packed_encoder, [bundle] * 3, [options] * 3))
    assert len(graphs) == 1
    assert count_entries(options) == 1
