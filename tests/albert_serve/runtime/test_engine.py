"""The engine's numbers against torch, any mix of inputs, refusals, and pre-packed weights."""

from __future__ import annotations

import logging
import multiprocessing
import random
import re
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
from tests.albert_serve.support import TorchEngine, copy_with
from training.model.checkpoint import load_checkpoint

TASKS = (
    "fill-mask",
    "sentence-order",
    "text-classification",
    "question-answering",
)


@pytest.fixture(scope="module")
def engine(bundle_dir: Path) -> Engine:
    return Engine.open(bundle_dir, RuntimeOptions(num_threads=1))


@pytest.fixture
def options(tmp_path: Path) -> RuntimeOptions:
    """With a cache of their own."""
    return RuntimeOptions(num_threads=1, cache_folder=tmp_path / "cache")


@pytest.fixture(scope="module")
def reference(checkpoint_dir: Path) -> TorchEngine:
    return TorchEngine(load_checkpoint(checkpoint_dir))


def make_input(
    task: str, num_tokens: int, rows: list[int] | None = None, seed: int = 0
) -> EncoderInput:
    chance = random.Random(f"{task} {num_tokens} {seed}")
    ids = [chance.randrange(1000) for _ in range(num_tokens)]
    types = [int(position > num_tokens // 2) for position in range(num_tokens)]
    return EncoderInput(ids=ids, types=types, task=task, rows=rows)


def mixed_inputs() -> list[EncoderInput]:
    """All tasks, lengths from 1 to the longest, rows of every kind, in no order."""
    lengths = [1, 2, 3, 31, 32, 33, 60, 64, 100, 127, 128]
    inputs = [
        make_input(task, length, rows=rows, seed=seed)
        for length in lengths
        for seed, task in enumerate(TASKS)
        for rows in ([0], [length - 1, 0], None, [])
    ]
    random.Random(0).shuffle(inputs)
    return inputs


@pytest.mark.parametrize("task", TASKS)
def test_logits_are_those_of_torch(engine: Engine, reference: TorchEngine, task: str) -> None:
    for num_tokens in (1, 17, 128):
        item = make_input(task, num_tokens)
        (expected,) = reference.run([item])
        (logits,) = engine.run([item])
        assert logits.dtype == np.float32
        assert np.ptp(expected) > 0.01  # logits that hardly differ would show nothing
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


def test_a_mixed_batch_equals_single_runs(engine: Engine, bundle_dir: Path) -> None:
    inputs = mixed_inputs()
    singles = [engine.run([item])[0] for item in inputs]
    batched = Engine.open(bundle_dir, RuntimeOptions(num_threads=1))
    batched.max_batch_tokens = 200
    for item, single, logits in zip(inputs, singles, batched.run(inputs), strict=True):
        num_rows = len(item.ids) if item.rows is None else len(item.rows)
        assert logits.shape == (num_rows, 1000 if item.task == "fill-mask" else 2)
        np.testing.assert_allclose(logits, single, rtol=0, atol=1e-5)
    for single, logits in zip(singles, batched.run_batch(inputs), strict=True):
        np.testing.assert_allclose(logits, single, rtol=0, atol=1e-5)


def test_hidden_states_are_read_in_the_batches_of_the_heads(
    engine: Engine, reference: TorchEngine
) -> None:
    features = []
    for length in (1, 31, 100):
        for rows in ([0], None):
            plain = make_input("feature-extraction", length, rows=rows)
            features += [replace(plain, reduction=kind) for kind in ("none", "mean", "max")]
    inputs = [item for pair in zip(features, mixed_inputs(), strict=False) for item in pair]
    for item, result in zip(inputs, engine.run_batch(inputs), strict=True):
        if item.task != "feature-extraction":
            np.testing.assert_allclose(result, engine.run([item])[0], rtol=0, atol=1e-5)
            continue
        (expected,) = reference.run([item])
        np.testing.assert_allclose(result, expected, rtol=0, atol=1e-4)


def test_many_threads_get_what_one_gets(engine: Engine) -> None:
    inputs = mixed_inputs()[:40]
    singles = [engine.run([item])[0] for item in inputs]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda item: engine.run([item])[0], inputs))
    for single, logits in zip(singles, together, strict=True):
        np.testing.assert_array_equal(logits, single)
    assert engine.run([]) == engine.run_batch([]) == []
    assert set(engine.tasks) == {*TASKS, "feature-extraction"}


@pytest.mark.parametrize(
    ("size", "num_tokens"), [("base", 512), ("large", 512), ("xlarge", 256), ("xxlarge", 128)]
)
def test_a_batch_has_as_many_tokens_as_documented(size: str, num_tokens: int) -> None:
    assert best_batch_tokens(preset(size), "cpu") == num_tokens
    assert best_batch_tokens(preset(size), "cuda") == 16_384


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"task": "translation"}, NotFoundError, "'translation'.* fill-mask, "),
        ({"ids": [999, 1000]}, InvalidInputError, "id 1000 .* 999"),
        ({"rows": [1, 2]}, InvalidInputError, "row 2 "),
        ({"ids": [5] * 129, "types": [0] * 129}, InvalidInputError, "129 tokens.* 128"),
    ],
)
def test_refusals_say_what_was_given_and_what_is_allowed(
    engine: Engine, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    plain = EncoderInput(ids=[2, 3], types=[0, 0], task="fill-mask", rows=None)
    for run in (engine.run, engine.run_batch):
        with pytest.raises(error, match=message):
            run([make_input("fill-mask", 5), replace(plain, **changes)])


def test_numbers_that_are_not_finite_are_an_error_of_their_task_alone(
    bundle_dir: Path, tmp_path: Path
) -> None:
    weights = bytearray((bundle_dir / "model.safetensors").read_bytes())
    bias = read_header(bundle_dir / "model.safetensors")["classifier.bias"]
    weights[bias.offset : bias.offset + 4] = np.float32("nan").tobytes()
    folder = copy_with(bundle_dir, tmp_path / "nan", "model.safetensors", bytes(weights))
    engine = Engine.open(folder, RuntimeOptions(num_threads=1))
    with pytest.raises(EngineError, match="text-classification are not finite"):
        engine.run([make_input("text-classification", 5, rows=[0])])
    assert len(engine.run([make_input("fill-mask", 5, rows=[0])])) == 1


def test_int8_answers_do_not_depend_on_the_texts_beside_them(int8_dir: Path) -> None:
    engine = Engine.open(int8_dir, RuntimeOptions(num_threads=1))
    inputs = some_inputs(engine.tasks)
    inputs += [EncoderInput(ids=[999] * 16, types=[1] * 16, task=engine.tasks[0], rows=[0])]
    together = engine.run(inputs)
    for alone, expected in zip(inputs, together, strict=True):
        np.testing.assert_array_equal(engine.run([alone])[0], expected)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_memory_of_a_very_large_batch_is_freed(bundle_dir: Path) -> None:
    engine = Engine.open(bundle_dir, RuntimeOptions(num_threads=1))
    engine.warm_up()
    return_free_memory()
    before = num_anonymous_bytes() or 0
    engine.run_batch([make_input("fill-mask", 128, rows=[0])] * 400)  # 100 MB of attention
    return_free_memory()
    assert (num_anonymous_bytes() or 0) - before < 32 << 20


def test_without_a_driver_auto_says_so_and_cuda_by_name_is_an_error(
    bundle_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if no_cuda_reason() != NO_DRIVER:
        pytest.skip("there is an NVIDIA driver here")
    caplog.set_level(logging.INFO, "albert_serve")
    assert Engine.open(bundle_dir, RuntimeOptions(num_threads=1, device="auto")).device == "cpu"
    assert caplog.messages == ["Running on the CPU. No NVIDIA driver is installed."]
    with pytest.raises(EngineError, match=r"CUDA .*No NVIDIA driver.*serve-gpu"):
        Engine.open(bundle_dir, RuntimeOptions(device="cuda"))


def entries(options: RuntimeOptions) -> list[Path]:
    assert options.cache_folder is not None
    return sorted(each for each in options.cache_folder.iterdir() if each.name != ".lock")


def test_packed_weights_on_disk_give_the_same_numbers(
    bundle_dir: Path, int8_dir: Path, options: RuntimeOptions
) -> None:
    """Of a batch alone, and of several in threads; an entry is made once, and then mapped."""
    for number, folder in enumerate((bundle_dir, int8_dir), start=1):
        in_memory = Engine.open(folder, RuntimeOptions(num_threads=1))
        for num_threads in (1, 3):
            packed = Engine.open(folder, replace(options, num_threads=num_threads))
            packed.max_batch_tokens = in_memory.max_batch_tokens = 64
            inputs = some_inputs(in_memory.tasks) * 4
            for expected, got in zip(in_memory.run(inputs), packed.run(inputs), strict=True):
                np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
            assert len(entries(options)) == number
        mapped = Path("/proc/self/maps").read_text()
        assert re.search(rf"{options.cache_folder}/\w+/encoder\.data", mapped)
        # Encoder and heads look words up in the same pages.
        assert str(folder / "model.safetensors") in mapped


def test_a_damaged_entry_is_made_anew(bundle_dir: Path, options: RuntimeOptions) -> None:
    bundle = Bundle.open(bundle_dir)
    packed = packed_encoder(bundle, options)
    assert packed is not None
    victim = packed.parent / "encoder.data"
    content = victim.read_bytes()
    for damaged in (content[:-1], content[:-20] + b"x" + content[-19:], None):
        victim.unlink()
        if damaged is not None:
            victim.write_bytes(damaged)
        assert packed_encoder(bundle, options) == packed
        assert victim.stat().st_size == len(content)
    Engine.open(bundle, options).warm_up()


def test_another_runtime_and_processor_have_entries_of_their_own(
    bundle_dir: Path, options: RuntimeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed_encoder(Bundle.open(bundle_dir), options)
    monkeypatch.setattr(ort, "__version__", "1.99.0")
    packed_encoder(Bundle.open(bundle_dir), options)
    assert len(entries(options)) == 2
    monkeypatch.setattr(prepacking, "cpu_name", lambda: "another")
    packed_encoder(Bundle.open(bundle_dir), options)
    assert len(entries(options)) == 3


def test_a_cache_that_cannot_be_written_is_done_without(
    bundle_dir: Path, options: RuntimeOptions, caplog: pytest.LogCaptureFixture
) -> None:
    assert options.cache_folder is not None
    options.cache_folder.write_text("")
    engine = Engine.open(Bundle.open(bundle_dir), options)
    engine.warm_up()
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "packed weights cannot be stored in" in record.getMessage()


@pytest.mark.process
def test_processes_that_start_together_make_one_entry(
    bundle_dir: Path, options: RuntimeOptions
) -> None:
    bundle = Bundle.open(bundle_dir)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(3, mp_context=context) as pool:
        graphs = set(pool.map(packed_encoder, [bundle] * 3, [options] * 3))
    assert len(graphs) == 1
    assert len(entries(options)) == 1
