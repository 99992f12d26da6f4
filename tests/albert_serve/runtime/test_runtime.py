"""ONNX Runtime's options, parallel batches, int8, and the device that is chosen."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from albert_serve.bundle.manifest import Bundle
from albert_serve.config import preset
from albert_serve.errors import EngineError, InvalidInputError
from albert_serve.runtime.cuda import NO_DRIVER, no_cuda_reason
from albert_serve.runtime.encoder_pool import best_batch_tokens
from albert_serve.runtime.engine import Engine
from albert_serve.runtime.ort import (
    encoder_options,
    head_options,
    open_session,
    return_free_memory,
)
from albert_serve.server.process.memory import num_anonymous_bytes
from albert_serve.settings import Device, RuntimeOptions
from albert_serve.tasks.base import EncoderInput
from tests.albert_serve.runtime.inputs import some_inputs


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


@pytest.mark.parametrize(
    ("size", "expected"), [("base", 512), ("large", 512), ("xlarge", 256), ("xxlarge", 128)]
)
def test_larger_models_have_smaller_batches(size: str, expected: int) -> None:
    assert best_batch_tokens(preset(size), "cpu") == expected


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
