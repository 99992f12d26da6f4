"""The doctor's measurements of a bundle on this machine."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from albert_serve.bundle.manifest import Bundle
from albert_serve.doctor.footprint import measure_footprint, read_memory
from albert_serve.doctor.measurement import Measurement, measure_bundle
from albert_serve.errors import EngineError
from albert_serve.settings import RuntimeOptions

NEEDS_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="memory is told by Linux only")


@pytest.fixture(scope="module")
def measured(bundle_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Measurement:
    """One worker, and two that share a cache."""
    options = RuntimeOptions(
        device="cpu",
        num_threads=1,
        prepack="cache",
        cache_folder=tmp_path_factory.mktemp("cache"),
    )
    return measure_bundle(Bundle.open(bundle_dir), options, num_workers=2)


def test_it_says_how_the_bundle_is_run(measured: Measurement, bundle_dir: Path) -> None:
    assert (measured.device, measured.threads, measured.prepack) == ("cpu", 1, "cache")
    assert (measured.folder, measured.num_workers) == (str(bundle_dir), 2)
    assert measured.weights_bytes == (bundle_dir / "model.safetensors").stat().st_size


def test_speeds_follow_from_times_and_sizes(measured: Measurement) -> None:
    shapes = [(speed.num_sequences, speed.num_tokens) for speed in measured.speeds]
    assert shapes == [(1, 8), (1, 32), (1, 128), (4, 128)]
    for speed in measured.speeds:
        assert speed.num_runs >= 1
        num_tokens = speed.num_sequences * speed.num_tokens
        assert speed.tokens_per_s == pytest.approx(1e3 * num_tokens / speed.median_ms)


@NEEDS_LINUX
def test_memory_is_that_of_all_processes_while_all_are_alive(measured: Measurement) -> None:
    one, two = measured.footprint, measured.workers_footprint
    assert one is not None
    assert two is not None
    assert (one.num_processes, two.num_processes) == (1, 2)
    for footprint in (one, two):
        assert footprint.sessions_s > 0
        for memory in (footprint.before, footprint.after):
            assert 0 < memory.anonymous_bytes < memory.pss_bytes < memory.peak_bytes
            assert memory.pss_bytes <= memory.private_bytes + memory.shared_bytes
        added = footprint.after.pss_bytes - footprint.before.pss_bytes
        assert footprint.bundle_pss_bytes == added > 0
        assert footprint.bundle_over_weights == added / measured.weights_bytes
        assert footprint.weights_over_file == footprint.weights_pss_bytes / measured.weights_bytes
        assert footprint.weights_over_file > 0.5
    # What two have in private is theirs; the pages of the libraries are common, and divided.
    assert one.after.anonymous_bytes < two.after.anonymous_bytes
    assert two.after.pss_bytes < two.after.private_bytes + two.after.shared_bytes


@NEEDS_LINUX
def test_memory_grows_with_allocations() -> None:
    before = read_memory()
    held = np.ones(64 << 17)  # 64 MiB, every page touched
    after = read_memory()
    for name in ("pss_bytes", "private_bytes", "anonymous_bytes"):
        assert getattr(after, name) - getattr(before, name) > 0.9 * held.nbytes
    assert after.peak_bytes >= before.peak_bytes


@NEEDS_LINUX
def test_an_error_of_a_process_is_raised(bundle_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    folder.mkdir()
    for file in bundle_dir.iterdir():
        (folder / file.name).hardlink_to(file)
    bundle = Bundle.open(folder)
    (folder / "encoder.onnx").unlink()
    with pytest.raises(EngineError, match=r"encoder\.onnx is not there"):
        measure_footprint(bundle, RuntimeOptions(device="cpu", num_threads=1), 1)
