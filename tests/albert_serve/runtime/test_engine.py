"""The engine's numbers against torch, any mix of inputs, ONNX Runtime's options, and refusals."""

from __future__ import annotations

import logging
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from albert_serve.bundle.manifest import Bundle
from albert_serve.bundle.weights import read_header
from albert_serve.errors import BundleCorruptError, EngineError, InvalidInputError, NotFoundError
from albert_serve.runtime.cuda import NO_DRIVER, no_cuda_reason
from albert_serve.runtime.engine import Engine
from albert_serve.runtime.ort import encoder_options, head_options, open_session, return_free_memory
from albert_serve.server.models import num_anonymous_bytes
from albert_serve.settings import Device, RuntimeOptions
from albert_serve.tasks import EncoderInput
from tests.albert_serve.runtime.inputs import some_inputs
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
@pytest.mark.parametrize("num_tokens", [1, 17, 128])
def test_logits_are_those_of_torch(
    engine: Engine, reference: TorchEngine, task: str, num_tokens: int
) -> None:
    item = make_input(task, num_tokens)
    (expected,) = reference.run([item])
    (logits,) = engine.run([item])
    assert logits.dtype == np.float32
    assert np.ptp(expected) > 0.01  # logits that hardly differ would show nothing
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("max_batch_tokens", [1, 200, 100_000])
def test_a_mixed_batch_equals_single_runs(
    engine: Engine, bundle_dir: Path, max_batch_tokens: int
) -> None:
    inputs = mixed_inputs()
    singles = [engine.run([item])[0] for item in inputs]
    batched = Engine.open(bundle_dir, RuntimeOptions(num_threads=1))
    batched.max_batch_tokens = max_batch_tokens
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
    for length in (1, 31, 32, 100):
        for rows in ([0], None):
            plain = make_input("feature-extraction", length, rows=rows)
            features += [plain, replace(plain, reduction="mean")]
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


def test_nothing_gives_nothing_and_warming_up_runs(engine: Engine) -> None:
    assert engine.run([]) == engine.run_batch([]) == []
    engine.warm_up()
    assert set(engine.tasks) == {*TASKS, "feature-extraction"}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"task": "translation"}, NotFoundError, "no task 'translation'; it has fill-mask, "),
        ({"ids": [2, 1000]}, InvalidInputError, "id 1000 is out of range; allowed are 0 to 999"),
        ({"types": [0, 2]}, InvalidInputError, "token type 2 is out of range"),
        ({"types": [0]}, InvalidInputError, "2 ids but 1 token types"),
        ({"rows": [2]}, InvalidInputError, "row 2 is out of range"),
        (
            {"ids": [5] * 129, "types": [0] * 129},
            InvalidInputError,
            "129 tokens; the model takes 1 to 128",
        ),
    ],
)
def test_refusals_say_what_was_given_and_what_is_allowed(
    engine: Engine, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    plain = EncoderInput(ids=[2, 3], types=[0, 0], task="fill-mask", rows=None)
    with pytest.raises(error, match=message):
        engine.run([make_input("fill-mask", 5), replace(plain, **changes)])


def test_numbers_that_are_not_finite_are_an_error_of_their_task_alone(
    bundle_dir: Path, tmp_path: Path
) -> None:
    weights = bytearray((bundle_dir / "model.safetensors").read_bytes())
    bias = read_header(bundle_dir / "model.safetensors")["classifier.bias"]
    weights[bias.offset : bias.offset + 4] = np.float32("nan").tobytes()
    folder = copy_with(bundle_dir, tmp_path / "nan", "model.safetensors", bytes(weights))
    engine = Engine.open(folder, RuntimeOptions(num_threads=1))
    with pytest.raises(EngineError, match="not finite for text-classification"):
        engine.run([make_input("text-classification", 5, rows=[0])])
    assert len(engine.run([make_input("fill-mask", 5, rows=[0])])) == 1


def test_a_graph_that_the_runtime_refuses_names_its_file(bundle_dir: Path, tmp_path: Path) -> None:
    name = Bundle.open(bundle_dir).manifest.heads["fill-mask"].graph
    folder = copy_with(bundle_dir, tmp_path / "bad", name, b"no graph")
    with pytest.raises(BundleCorruptError, match=f"{name} cannot be loaded"):
        Engine.open(folder)


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


def test_int8_answers_do_not_depend_on_the_texts_beside_them(int8_dir: Path) -> None:
    engine = Engine.open(int8_dir, RuntimeOptions(num_threads=1))
    inputs = some_inputs(engine.tasks)
    inputs += [EncoderInput(ids=[999] * 16, types=[1] * 16, task=engine.tasks[0], rows=[0])]
    together = engine.run(inputs)
    for alone, expected in zip(inputs, together, strict=True):
        np.testing.assert_array_equal(engine.run([alone])[0], expected)


def test_the_fusion_that_is_slower_does_not_happen(bundle_dir: Path, tmp_path: Path) -> None:
    made = encoder_options(RuntimeOptions(num_threads=1))
    made.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    open_session(bundle_dir / "encoder.onnx", made)
    optimized = (tmp_path / "optimized.onnx").read_bytes()
    assert b"SkipLayerNormalization" not in optimized
    assert b"LayerNormalization" in optimized
    assert b"FastGelu" in optimized


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_head_keeps_no_memory_of_the_sizes_that_it_had(bundle_dir: Path) -> None:
    head = open_session(bundle_dir / "fill-mask.onnx", head_options(), folds=False)
    hidden_BSH = np.zeros((1, 1, 64), np.float32)
    before = num_anonymous_bytes()
    for num_rows in range(500, 8001, 500):  # up to 32 MB of logits, 272 MB together
        head.run(None, {"hidden_states": hidden_BSH, "rows": np.zeros(num_rows, np.int64)})
    return_free_memory()
    after = num_anonymous_bytes()
    assert before is not None
    assert after is not None
    assert after - before < 16 << 20


def test_without_a_driver_auto_says_so_and_cuda_by_name_is_an_error(
    bundle_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if no_cuda_reason() != NO_DRIVER:
        pytest.skip("there is an NVIDIA driver here")
    caplog.set_level(logging.INFO, "albert_serve")
    cases: tuple[tuple[Device, list[tuple[int, str]]], ...] = (
        ("cpu", []),
        ("auto", [(logging.INFO, "running on the CPU: no NVIDIA driver is installed")]),
    )
    for device, lines in cases:
        caplog.clear()
        assert Engine.open(bundle_dir, RuntimeOptions(num_threads=1, device=device)).device == "cpu"
        assert [(record.levelno, record.getMessage()) for record in caplog.records] == lines
    with pytest.raises(EngineError, match=r"CUDA is asked for and cannot be used: .*serve-gpu"):
        Engine.open(bundle_dir, RuntimeOptions(device="cuda"))
