"""Weights in fp16 and int8: which are converted, and that only rounding changes them."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Final, get_args

import numpy as np
import onnx
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from onnx import numpy_helper
from safetensors.numpy import load_file

from albert_serve.bundle.manifest import Bundle, Part
from albert_serve.bundle.weights import SCALE_SUFFIX, SMOOTHING_SUFFIX
from export.precision import part_of, quantize, smoothing
from tests.export.exporting import TINY, export_bundle, run_head, write_checkpoint
from tests.programs import needs_program
from training.conversion.weight_files import restore_weights
from training.model.checkpoint import load_checkpoint, save_checkpoint

pytestmark = pytest.mark.process

CONFIG: Final = replace(TINY, hidden_size=96, ffn_size=128, embedding_size=32)

matrices: Final = arrays.arrays(
    np.float32,
    arrays.array_shapes(min_dims=2, max_dims=2, max_side=9),
    elements=st.floats(-100, 100, width=32, allow_subnormal=False),
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(matrices)
def test_a_quantized_weight_is_within_half_a_step_and_saturates_no_sum(
    weight_OI: np.ndarray,
) -> None:
    """x86 CPUs without VNNI add the products of two adjacent inputs in 16 bits."""
    int8_IO, scale_O = quantize(weight_OI)
    assert int8_IO.dtype == np.int8
    assert int8_IO.shape == weight_OI.shape[::-1]
    restored_OI = (int8_IO * scale_O.astype(np.float64)).T
    assert (np.abs(restored_OI - weight_OI) <= scale_O[:, None] * 0.501 + 1e-40).all()
    even_IO = np.pad(int8_IO.astype(np.int64), ((0, len(int8_IO) % 2), (0, 0)))
    largest = 255 * np.maximum(even_IO[::2], 0) + 255 * np.maximum(even_IO[1::2], 0)
    smallest = 255 * np.minimum(even_IO[::2], 0) + 255 * np.minimum(even_IO[1::2], 0)
    assert largest.max() < 2**15
    assert smallest.min() >= -(2**15)


def test_the_scale_is_the_smallest_for_127_steps() -> None:
    weight_OI = np.array([[127, -2, 3], [0, 0, 0], [100, 154, -1], [1, 2, -254]], np.float32)
    int8_IO, scale_O = quantize(weight_OI)
    assert scale_O.tolist() == [1, 0, 2, 2]
    assert int8_IO.T.tolist() == [[127, -2, 3], [0, 0, 0], [50, 77, 0], [0, 1, -127]]


def test_channels_above_the_median_are_smoothed_by_the_square_root_of_their_ratio() -> None:
    assert smoothing(np.array([0.1, 0.2, 0.8])).tolist() == pytest.approx([1, 1, 0.5])
    assert smoothing(np.array([0.0, 0.0, 3.0])).tolist() == [1, 1, 1]


@pytest.fixture
def wide_checkpoint(tmp_path: Path) -> Path:
    """A checkpoint whose feed-forward part has an outlier channel, as trained models have."""
    model = write_checkpoint(tmp_path / "checkpoint", CONFIG)
    with torch.no_grad():
        model.get_parameter("albert.encoder.ffns.0.up.bias")[0] = 50.0
        model.get_parameter("albert.encoder.ffns.0.down.weight")[:, 0] /= 50.0
    save_checkpoint(model, tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


@pytest.mark.parametrize(
    ("precision", "parts", "tolerance"),
    [
        ("int8", ("heads", "attention"), 0.5),
        ("int8", get_args(Part), 1e-4),
        ("fp16", ("ffn",), 0.02),
    ],
)
def test_a_lower_precision_rounds_only_the_matrices_that_are_not_among_the_parts_in_fp32(
    wide_checkpoint: Path, tmp_path: Path, precision: str, parts: tuple[str, ...], tolerance: float
) -> None:
    target = tmp_path / "bundle"
    exported = export_bundle(wide_checkpoint, target, precision=precision, keep_fp32=parts)
    bundle = Bundle.open(target)
    assert exported.unused == []
    assert (bundle.manifest.precision, bundle.manifest.kept_fp32) == (precision, sorted(parts))
    assert bundle.manifest.parity["encoder"] < tolerance
    stored = load_file(bundle.weights_file)
    restore_weights(bundle.weights_file, tmp_path / "restored")
    restored = load_file(tmp_path / "restored")
    for name, original in load_file(wide_checkpoint / "model.safetensors").items():
        part = part_of(name)
        if part is None or part in parts:
            np.testing.assert_array_equal(stored[name], original)
            assert name + SCALE_SUFFIX not in stored
        elif precision == "fp16":
            np.testing.assert_array_equal(stored[name], original.astype(np.float16))
        else:
            assert stored[name].dtype == np.int8
            half_step = 0.501 * stored[name + SCALE_SUFFIX][:, None]
            half_step = half_step * stored.get(name + SMOOTHING_SUFFIX, np.float32(1))
            assert (np.abs(restored[name] - original) <= half_step).all(), name


def test_a_product_in_int8_rounds_only_its_inputs(wide_checkpoint: Path, tmp_path: Path) -> None:
    """Inputs that are multiples of their row's scale give the logits of torch."""
    bundle = export_bundle(wide_checkpoint, tmp_path / "bundle", precision="int8").bundle
    restore_weights(bundle.weights_file, tmp_path / "model.safetensors")
    shutil.copy(wide_checkpoint / "config.json", tmp_path)
    rng = np.random.default_rng(0)
    steps_RI = rng.integers(-127, 128, (5, CONFIG.hidden_size))
    steps_RI[:, 0] = [127, -127, 127, -127, 0]
    steps_RI[4] = 0
    scale_R1 = rng.uniform(1e-4, 1e-3, (5, 1))
    factors_I = load_file(bundle.weights_file)[f"albert.pooler.weight{SMOOTHING_SUFFIX}"]
    rows_RI = (steps_RI * scale_R1 / factors_I).astype(np.float32)
    with torch.inference_mode():
        expected = load_checkpoint(tmp_path).logits("sentence-order", torch.from_numpy(rows_RI))
    logits = run_head(bundle.folder, "sentence-order", rows_RI)
    np.testing.assert_allclose(logits, expected.numpy(), atol=1e-5)


# A graph that multiplies x - 128, with x in uint8, by the weights in int8.
_PRODUCT: Final = """
<ir_version: 9, opset_import: ["": 17]>
product (uint8[rows, 96] x) => (int32[rows, 64] sums) { sums = MatMulInteger(x, weight, zero) }
"""
_MULTIPLY: Final = """
import sys
import numpy as np
import onnxruntime

x_RI = np.random.default_rng(0).choice(np.array([1, 255], np.uint8), (33, 96))
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
sums = [session.run(None, {"x": x_RI[:num_rows]})[0] for num_rows in (1, 3, 33)]
np.savez(sys.argv[2], x=x_RI, sums=np.concatenate(sums))
"""


@pytest.mark.extended
@pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="emulates an x86-64 CPU"
)
def test_int8_products_are_exact_on_a_cpu_without_vnni(tmp_path: Path) -> None:
    """The emulated CPU has AVX2, but not AVX-512 or VNNI."""
    qemu = needs_program("qemu-x86_64", package="qemu-user")
    int8_IO, _ = quantize(np.random.default_rng(0).normal(size=(64, 96)).astype(np.float32))
    model = onnx.parser.parse_model(_PRODUCT)
    for name, values in {"weight": int8_IO, "zero": np.array(128, np.uint8)}.items():
        model.graph.initializer.append(numpy_helper.from_array(values, name))
    onnx.save(model, tmp_path / "product.onnx")
    files = [str(tmp_path / "product.onnx"), str(tmp_path / "result.npz")]
    program = [qemu, "-cpu", "Haswell", sys.executable, "-c", _MULTIPLY, *files]
    subprocess.run(program, check=True, capture_output=True)
    result = np.load(tmp_path / "result.npz")
    exact = (result["x"].astype(np.int64) - 128) @ int8_IO.astype(np.int64)
    np.testing.assert_array_equal(result["sums"], np.concatenate([exact[:1], exact[:3], exact]))
