"""An exported bundle answers on every device as its checkpoint does on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

from albert_serve.errors import EngineError
from albert_serve.runtime.encoder_pool import EncoderPool
from albert_serve.runtime.engine import Engine
from albert_serve.settings import Device, RuntimeOptions
from albert_serve.tasks.base import EncoderInput
from export.bundle import export_bundle
from export.graph import Compute
from tests.albert_serve.runtime.inputs import some_inputs
from tests.devices import each_device

# Of the largest logit; docs/decisions.md has the limits of export.
LIMITS = {"fp32": 1e-4, "fp16": 0.06, "bf16": 0.3}


@each_device
@pytest.mark.parametrize("compute", get_args(Compute))
def test_a_device_answers_as_the_cpu(
    checkpoint_dir: Path, bundle_dir: Path, tmp_path: Path, device: Device, compute: Compute
) -> None:
    """In every shape, captured and replayed; two models at once, and one that was closed."""
    exported = export_bundle(checkpoint_dir, tmp_path / "bundle", cuda_precision=compute)
    folder = exported.bundle.folder
    pool, options = EncoderPool(), RuntimeOptions(device=device, num_threads=1)
    expected = Engine.open(bundle_dir, RuntimeOptions(device="cpu", num_threads=1))
    engine, other = (Engine.open(folder, options, pool) for _ in range(2))
    engine.warm_up()
    limit = 1e-4 if device == "cpu" else LIMITS[compute]
    for round_ in range(4):
        inputs = some_inputs(engine.tasks, seed=round_ // 2) * (1 + round_)
        for got, wanted in zip(engine.run(inputs), expected.run(inputs), strict=True):
            assert np.abs(got - wanted).max() < limit * max(1, np.abs(wanted).max())
        if round_ == 2:
            other.warm_up()
            del other
    assert engine.device == device


@pytest.mark.gpu
def test_a_device_that_is_full_fails_what_needs_more(bundle_dir: Path) -> None:
    """Other calls are answered as before; another model is opened when there is room again."""
    options = RuntimeOptions(device="cuda", num_threads=1)
    engine = Engine.open(bundle_dir, options)
    engine.warm_up()
    short = [EncoderInput(ids=[5] * 16, types=[0] * 16, task="fill-mask", rows=[0])]
    (before,) = engine.run_batch(short)
    length = engine.config.max_positions
    long = [EncoderInput(ids=[5] * length, types=[0] * length, task="fill-mask", rows=[0])]
    most = torch.empty(torch.cuda.mem_get_info()[0] - (8 << 20), dtype=torch.uint8, device="cuda")
    with pytest.raises(EngineError, match="the runtime failed on ids"):
        engine.run_batch(long * (1_000_000 // length))
    assert np.array_equal(engine.run_batch(short)[0], before)
    del most
    torch.cuda.empty_cache()
    assert Engine.open(bundle_dir, options).device == "cuda"
