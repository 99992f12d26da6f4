"""Weight files in fp16 and int8: what is converted, how well, and how small it is."""

from __future__ import annotations

import platform
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
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import load_file

from albert_serve.bundle.manifest import Bundle, Part
from albert_serve.bundle.weights import SCALE_SUFFIX, check_shapes, expected_shapes, read_header
from albert_serve.errors import BundleCorruptError
from export.config import ExportError
from export.precision import part_of, quantize, write_weights
from export.source import read_source
from tests.albert_serve.support import ROOT
from tests.export.exporting import TINY, export_bundle, ragged, run_encoder, write_checkpoint
from tests.programs import needs_program
from training.model.checkpoint import save_checkpoint

pytestmark = pytest.mark.process

WORDS = "albert.embeddings.word_embeddings.weight"
LAYER = "albert.encoder.albert_layer_groups.0.albert_layers.0"
CONFIG = replace(TINY, hidden_size=96, ffn_size=128, embedding_size=32)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "checkpoint", CONFIG)
    return tmp_path / "checkpoint"


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    arrays.arrays(
        np.float32,
        arrays.array_shapes(min_dims=2, max_dims=2, max_side=9),
        elements=st.floats(-100, 100, width=32),
    )
)
def test_a_quantized_weight_is_within_half_a_step(weight_OI: np.ndarray) -> None:
    int8_IO, scale_O = quantize(weight_OI)
    assert int8_IO.dtype == np.int8
    assert int8_IO.shape == weight_OI.shape[::-1]
    assert int8_IO.min(initial=0) >= -127
    restored_OI = (int8_IO * scale_O.astype(np.float64)).T
    assert (np.abs(restored_OI - weight_OI) <= scale_O[:, None] * 0.501 + 1e-40).all()


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    arrays.arrays(
        np.float32,
        arrays.array_shapes(min_dims=2, max_dims=2, max_side=9),
        elements=st.floats(-100, 100, width=32, allow_subnormal=False),
    )
)
def test_no_activation_saturates_a_16_bit_sum_of_two_products(weight_OI: np.ndarray) -> None:
    int8_IO, _ = quantize(weight_OI)
    even_IO = np.pad(int8_IO.astype(np.int64), ((0, len(int8_IO) % 2), (0, 0)))
    largest = 255 * np.maximum(even_IO[::2], 0) + 255 * np.maximum(even_IO[1::2], 0)
    smallest = 255 * np.minimum(even_IO[::2], 0) + 255 * np.minimum(even_IO[1::2], 0)
    assert largest.max() < 2**15
    assert smallest.min() >= -(2**15)


_ANSWER: Final = """
import sys
from pathlib import Path
import numpy as np
import onnxruntime
from albert_serve.runtime.engine import Engine
from albert_serve.settings import RuntimeOptions
from albert_serve.tasks.base import EncoderInput

product, bundle, result = map(Path, sys.argv[1:])
runs = np.random.default_rng(0)
x_RI = runs.choice(np.array([1, 255], np.uint8), (33, 96))
session = onnxruntime.InferenceSession(product, providers=["CPUExecutionProvider"])
sums = [session.run(None, {"x": x_RI[:num_rows]})[0] for num_rows in (1, 3, 33)]
engine = Engine.open(bundle, RuntimeOptions(device="cpu", num_threads=1))
inputs = [
    EncoderInput(ids=runs.integers(5, 50, n).tolist(), types=[0] * n, task=task, rows=[0])
    for n in (3, 30)
    for task in engine.tasks
]
np.savez(result, x=x_RI, sums=np.concatenate(sums), *engine.run(inputs))
"""


needs_emulation: Final = pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="emulates an x86-64 CPU"
)


def without_vnni() -> list[str]:
    """The command that emulates a CPU with AVX2 and neither AVX-512 nor VNNI."""
    return [needs_program("qemu-x86_64", package="qemu-user"), "-cpu", "Haswell"]


@pytest.mark.extended
@needs_emulation
def test_int8_is_exported_without_labels_on_a_cpu_without_vnni(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint", CONFIG, tasks=("text-classification",))
    export = [sys.executable, "-m", "export", "--precision", "int8", str(tmp_path / "checkpoint")]
    differences = []
    for prefix, name in (([], "here"), (without_vnni(), "emulated")):
        program = [*prefix, *export, str(tmp_path / name)]
        done = subprocess.run(program, cwd=ROOT, check=True, capture_output=True, text=True)
        _, _, printed = done.stdout.partition("mean difference of probabilities")
        differences.append(float(printed.split()[-1]))
    assert 0 < differences[0] < 0.2
    assert differences[1] == pytest.approx(differences[0], abs=1e-3)


@needs_emulation
def test_int8_is_as_exact_on_a_cpu_without_vnni(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    write_checkpoint(checkpoint, replace(CONFIG, sharing="attention"))
    weight_OI = np.random.default_rng(0).normal(size=(64, 96)).astype(np.float32)
    int8_IO, _ = quantize(weight_OI)
    onnx.save(integer_product(int8_IO), tmp_path / "product.onnx")
    bundle = export_bundle(checkpoint, tmp_path / "bundle", precision="int8").bundle.folder
    here, emulated = tmp_path / "here.npz", tmp_path / "emulated.npz"
    for prefix, result in (([], here), (without_vnni(), emulated)):
        files = map(str, (tmp_path / "product.onnx", bundle, result))
        program = [*prefix, sys.executable, "-c", _ANSWER, *files]
        subprocess.run(program, cwd=ROOT, check=True, capture_output=True)

    answers = dict(np.load(emulated))
    x_RI, sums = answers.pop("x").astype(np.int64) - 128, answers.pop("sums")
    exact = x_RI @ int8_IO.astype(np.int64)
    np.testing.assert_array_equal(sums, np.concatenate([exact[:1], exact[:3], exact]))
    assert answers
    for name, logits in np.load(here).items():
        if name in answers:
            np.testing.assert_allclose(answers[name], logits, atol=1e-3 * np.abs(logits).max())


def integer_product(int8_IO: np.ndarray) -> onnx.ModelProto:
    """(x - 128) (R, I) as uint8 times these weights, in integers, by the kernels of the bundle."""
    num_in, num_out = int8_IO.shape
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["x", "weight", "zero"], ["sums"])],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, ["rows", num_in])],
        [helper.make_tensor_value_info("sums", TensorProto.INT32, ["rows", num_out])],
        [
            numpy_helper.from_array(int8_IO, "weight"),
            numpy_helper.from_array(np.array(128, np.uint8), "zero"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


@pytest.mark.parametrize("kept", [*((part,) for part in get_args(Part)), get_args(Part)])
def test_a_part_that_is_kept_is_the_checkpoints_own(
    checkpoint: Path, tmp_path: Path, kept: tuple[Part, ...]
) -> None:
    bundle = export_bundle(checkpoint, tmp_path / "bundle", precision="int8", keep_fp32=kept).bundle
    assert bundle.manifest.kept_fp32 == sorted(kept)
    original, written = (
        load_file(folder / "model.safetensors") for folder in (checkpoint, bundle.folder)
    )
    for name, array in original.items():
        if part_of(name) in kept:
            np.testing.assert_array_equal(written[name], array)
            assert name + SCALE_SUFFIX not in written
        elif part_of(name):
            assert written[name].dtype == np.int8
    assert (bundle.manifest.parity["encoder"] < 1e-4) == (len(kept) == len(get_args(Part)))


@pytest.mark.parametrize(
    ("precision", "worst"),
    [
        ("fp32", 1e-5),
        ("fp16", 0.02),
        ("int8", 0.5),
    ],
)
def test_a_bundle_of_each_precision_computes_what_torch_does(
    checkpoint: Path, tmp_path: Path, precision: str, worst: float
) -> None:
    full = tmp_path / "full"
    export_bundle(checkpoint, full)
    exported = export_bundle(checkpoint, tmp_path / precision, precision=precision)
    bundle = Bundle.open(tmp_path / precision)
    assert bundle.manifest.precision == precision
    assert exported.unused == []
    sample = ragged(CONFIG)
    expected, got = run_encoder(full, sample), run_encoder(bundle.folder, sample)
    difference = np.abs(expected - got)[sample.is_real]
    assert difference.max() < worst
    if precision != "fp32":
        assert difference.max() > 1e-5


def test_a_weight_over_fp16s_largest_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    model = write_checkpoint(checkpoint, CONFIG)
    with torch.no_grad():
        dict(model.named_parameters())["albert.encoder.ffns.0.up.weight"][0, 0] = 70000.0
    save_checkpoint(model, checkpoint)
    with pytest.raises(ExportError, match=r"over 65504.*--keep-fp32 ffn"):
        export_bundle(checkpoint, tmp_path / "bundle", precision="fp16")
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("wrong", ["scale gone", "scale too long", "not turned"])
def test_an_int8_weight_without_its_scale_is_no_bundle(
    checkpoint: Path, tmp_path: Path, wrong: str
) -> None:
    write_weights(read_source(checkpoint), tmp_path / "weights", "int8", (), {})
    stored = read_header(tmp_path / "weights")
    name = f"{LAYER}.ffn.weight"
    if wrong == "scale gone":
        del stored[name + SCALE_SUFFIX]
    elif wrong == "scale too long":
        stored[name + SCALE_SUFFIX] = replace(stored[name + SCALE_SUFFIX], shape=(129,))
    else:
        stored[name] = replace(stored[name], shape=stored[name].shape[::-1])
    with pytest.raises(BundleCorruptError, match=r"ffn\.weight"):
        check_shapes(stored, expected_shapes(CONFIG, {}))


def test_an_outlier_channel_does_not_take_the_scale_from_the_others(
    checkpoint: Path, tmp_path: Path
) -> None:
    """As the hidden states of [CLS] have one, here those of all tokens."""
    model = write_checkpoint(checkpoint, CONFIG)
    unit = dict(model.named_parameters())
    with torch.no_grad():
        unit["albert.encoder.ffns.0.up.bias"][0] = 50.0
        unit["albert.encoder.ffns.0.down.weight"][:, 0] /= 50.0
    save_checkpoint(model, checkpoint)
    bundle = export_bundle(checkpoint, tmp_path / "bundle", precision="int8").bundle
    assert bundle.manifest.parity["encoder"] < 0.2
