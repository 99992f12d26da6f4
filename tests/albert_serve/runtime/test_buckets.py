"""Encoders that run in buckets of shapes, as on a CUDA device."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from albert_serve.bundle.manifest import Bundle
from albert_serve.runtime.encoder_pool import OpenEncoder
from albert_serve.runtime.encoders import BucketedEncoder, CpuEncoder, PaddedBatch, bucket_shape
from albert_serve.runtime.engine import Engine
from albert_serve.runtime.ort import encoder_options, head_options, open_session
from albert_serve.settings import RuntimeOptions
from tests.albert_serve.runtime.inputs import some_inputs


class Recorded(BucketedEncoder):
    """An encoder on this processor that notes the shapes and the threads of its calls."""

    def __init__(self, bundle: Bundle) -> None:
        super().__init__(encoder_session(bundle), bundle.config, device="cpu")
        self.shapes: list[tuple[int, ...]] = []
        self.threads: set[str] = set()

    def run(self, batch: PaddedBatch) -> ort.OrtValue:
        self.shapes.append(batch.ids.shape)
        self.threads.add(threading.current_thread().name)
        return super().run(batch)


def encoder_session(bundle: Bundle) -> ort.InferenceSession:
    return open_session(bundle.encoder_file, encoder_options(RuntimeOptions(num_threads=1)))


@pytest.fixture
def bundle(bundle_dir: Path) -> Bundle:
    return Bundle.open(bundle_dir)


@pytest.fixture
def encoder(bundle: Bundle) -> Recorded:
    return Recorded(bundle)


@pytest.fixture
def engine(bundle: Bundle, encoder: Recorded) -> Engine:
    """As on a CUDA device, but for the device."""
    heads = {
        str(t): open_session(bundle.head_file(t), head_options()) for t in bundle.manifest.tasks
    }
    return Engine(bundle.config, OpenEncoder(encoder=encoder), heads, device="cuda")


def test_buckets_give_the_numbers_of_the_exact_shape(bundle: Bundle) -> None:
    session = encoder_session(bundle)
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


def test_an_engine_runs_on_buckets(bundle: Bundle, engine: Engine) -> None:
    reference = Engine.open(bundle, RuntimeOptions(num_threads=1))
    inputs = some_inputs(engine.tasks) * 3
    for expected, got in zip(reference.run(inputs), engine.run(inputs), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-4)


@pytest.mark.parametrize(("max_positions", "most"), [(100, 27), (512, 79), (4096, 160)])
def test_the_number_and_size_of_buckets_are_bounded(max_positions: int, most: int) -> None:
    shapes = {
        bucket_shape(num_sequences, num_positions, max_positions)
        for num_positions in range(1, max_positions + 1)
        for num_sequences in range(1, 4096 // num_positions + 2)
    } - {None}
    assert len(shapes) <= most
    assert all(shape and shape[0] * shape[1] <= 4096 for shape in shapes)


def test_several_shapes_are_run_before_the_first_request(encoder: Recorded, engine: Engine) -> None:
    engine.warm_up()
    buckets = {bucket_shape(n, s, max_positions=128) for n, s in encoder.shapes}
    assert buckets >= {(n, s) for n in (1, 4) for s in (32, 64, 128)}


def test_all_calls_of_a_device_are_made_on_one_thread(encoder: Recorded, engine: Engine) -> None:
    """A captured graph belongs to the thread that captured it: warm-up's, and the queue's."""
    inputs = some_inputs(["fill-mask"])
    expected = engine.run(inputs)
    with ThreadPoolExecutor(4) as threads:
        for answers in threads.map(engine.run, [inputs] * 8):
            for one, other in zip(expected, answers, strict=True):
                np.testing.assert_array_equal(one, other)
    assert len(encoder.threads) == 1
