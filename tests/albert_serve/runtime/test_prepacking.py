"""The pre-packed weights on disk: made once, checked, shared, and done without."""

from __future__ import annotations

import logging
import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from albert_serve.bundle.manifest import Bundle
from albert_serve.runtime import prepacking
from albert_serve.runtime.engine import Engine
from albert_serve.runtime.prepacking import packed_encoder
from albert_serve.settings import RuntimeOptions
from tests.albert_serve.runtime.inputs import some_inputs

pytestmark = pytest.mark.process


def entries(options: RuntimeOptions) -> list[Path]:
    assert options.cache_folder is not None
    return sorted(each for each in options.cache_folder.iterdir() if each.name != ".lock")


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_packed_weights_on_disk_give_the_same_numbers(
    bundle_dir: Path, int8_dir: Path, options: RuntimeOptions, precision: str
) -> None:
    bundle = Bundle.open(bundle_dir if precision == "fp32" else int8_dir)
    in_memory = Engine.open(bundle, RuntimeOptions(device="cpu", num_threads=1))
    inputs = some_inputs(in_memory.tasks)
    expected = in_memory.run(inputs)
    times_ns = set()
    for _ in range(2):  # made, then found
        got = Engine.open(bundle, options).run(inputs)
        for one, other in zip(expected, got, strict=True):
            np.testing.assert_array_equal(one, other)
        times_ns.add(tuple(each.stat().st_mtime_ns for each in entries(options)))
    assert [len(each) for each in times_ns] == [1]


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


def test_another_runtime_processor_and_bundle_have_entries_of_their_own(
    bundle_dir: Path, int8_dir: Path, options: RuntimeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in (bundle_dir, int8_dir):
        packed_encoder(Bundle.open(folder), options)
    assert len(entries(options)) == 2
    monkeypatch.setattr(ort, "__version__", "1.99.0")
    packed_encoder(Bundle.open(bundle_dir), options)
    assert len(entries(options)) == 3
    monkeypatch.setattr(prepacking, "cpu_name", lambda: "another")
    packed_encoder(Bundle.open(bundle_dir), options)
    assert len(entries(options)) == 4


def test_a_cache_that_cannot_be_written_is_done_without(
    bundle_dir: Path, options: RuntimeOptions, caplog: pytest.LogCaptureFixture
) -> None:
    assert options.cache_folder is not None
    options.cache_folder.write_text("")
    engine = Engine.open(Bundle.open(bundle_dir), options)
    engine.warm_up()
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "packed weights cannot be stored in" in record.getMessage()


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
