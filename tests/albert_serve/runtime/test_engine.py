"""The engine's numbers against torch, any mix of tasks and lengths, and what it refuses."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from albert_serve.bundle.manifest import Bundle
from albert_serve.bundle.weights import read_header
from albert_serve.errors import (
    BundleCorruptError,
    EngineError,
    InvalidInputError,
    NotFoundError,
)
from albert_serve.runtime.engine import Engine
from albert_serve.settings import RuntimeOptions
from albert_serve.tasks import EncoderInput
from tests.albert_serve.support import copy_with
from tests.albert_serve.task_fixtures import TorchEngine
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
        ({"ids": [2, -1]}, InvalidInputError, "id -1 is out of range"),
        ({"types": [0, 2]}, InvalidInputError, "token type 2 is out of range"),
        ({"types": [0]}, InvalidInputError, "2 ids but 1 token types"),
        ({"rows": [2]}, InvalidInputError, "row 2 is out of range"),
        (
            {"ids": [5] * 129, "types": [0] * 129},
            InvalidInputError,
            "129 tokens; the model takes 1 to 128",
        ),
        ({"ids": [], "types": []}, InvalidInputError, "0 tokens"),
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
    name = Bundle.open(bundle_dir).manifest.tasks["fill-mask"].graph
    folder = copy_with(bundle_dir, tmp_path / "bad", name, b"no graph")
    with pytest.raises(BundleCorruptError, match=f"{name} cannot be loaded"):
        Engine.open(folder)
