"""The doctor's measurements of a bundle on this machine, and its advice."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from albert_serve.bundle.manifest import Bundle
from albert_serve.doctor.advice import advise, int8_speedup
from albert_serve.doctor.examination import Diagnosis, diagnose
from albert_serve.doctor.findings import findings_text
from albert_serve.doctor.footprint import Footprint, _started, measure_footprint
from albert_serve.doctor.machine import cpu_quota, read_machine
from albert_serve.doctor.memory import read_memory
from albert_serve.doctor.products import Product, Products
from albert_serve.doctor.speed import Speed, encoder_flops, linear_flops
from albert_serve.doctor.timing import time_runs
from albert_serve.errors import EngineError
from albert_serve.settings import RuntimeOptions
from scripts.product_graphs import FOLDER, product_graph
from training.model.albert import Batch
from training.model.checkpoint import load_checkpoint

NEEDS_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="memory is told by Linux only")


@pytest.fixture(scope="module")
def diagnosis(bundle_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Diagnosis:
    """The footprint of two workers that share a cache."""
    options = RuntimeOptions(
        device="cpu",
        num_threads=1,
        prepack="cache",
        cache_folder=tmp_path_factory.mktemp("cache"),
    )
    return diagnose(Bundle.open(bundle_dir), options, num_workers=2)


def test_it_says_how_the_bundle_is_run(diagnosis: Diagnosis, bundle_dir: Path) -> None:
    assert (diagnosis.device, diagnosis.threads, diagnosis.prepack, diagnosis.num_workers) == (
        "cpu",
        1,
        "cache",
        2,
    )
    assert diagnosis.folder == str(bundle_dir)
    assert diagnosis.weights_bytes == (bundle_dir / "model.safetensors").stat().st_size


def test_speeds_follow_from_times_and_sizes(diagnosis: Diagnosis) -> None:
    shapes = [(speed.num_sequences, speed.num_tokens) for speed in diagnosis.speeds]
    assert shapes == [(1, 8), (1, 32), (1, 128), (4, 128)]
    for speed in diagnosis.speeds:
        assert 0 < speed.fastest_ms <= speed.median_ms
        assert speed.num_runs >= 1
        num_tokens = speed.num_sequences * speed.num_tokens
        assert speed.tokens_per_s == pytest.approx(1e3 * num_tokens / speed.median_ms)
        flops = encoder_flops(diagnosis.config, speed.num_sequences, speed.num_tokens)
        assert speed.gflops_per_s == pytest.approx(1e-6 * flops / speed.fastest_ms)
        peak = diagnosis.products.fp32_gflops_per_s
        assert speed.share_of_peak == pytest.approx(speed.gflops_per_s / peak)


@NEEDS_LINUX
def test_openings_are_times(diagnosis: Diagnosis) -> None:
    assert diagnosis.opening_cold is not None
    for opening in (diagnosis.opening_cold, diagnosis.opening_warm):
        assert min(opening.check_s, opening.sessions_s, opening.first_run_s) > 0
    assert diagnosis.fills_cache


@NEEDS_LINUX
def test_memory_is_that_of_all_processes_while_all_are_alive(diagnosis: Diagnosis) -> None:
    one, two = diagnosis.footprint, diagnosis.workers_footprint
    assert one is not None
    assert two is not None
    assert (one.num_processes, two.num_processes) == (1, 2)
    for footprint in (one, two):
        assert len(footprint.opening) == footprint.num_processes
        for memory in (footprint.before, footprint.after):
            assert 0 < memory.anonymous_bytes < memory.pss_bytes < memory.peak_bytes
            assert memory.pss_bytes <= memory.private_bytes + memory.shared_bytes
        added = footprint.after.pss_bytes - footprint.before.pss_bytes
        assert footprint.bundle_pss_bytes == added > 0
        assert footprint.bundle_over_weights == added / diagnosis.weights_bytes
        assert footprint.weights_over_file == footprint.weights_pss_bytes / diagnosis.weights_bytes
        assert footprint.weights_over_file > 0.5
    # What two have in private is theirs; the pages of the libraries are common, and divided.
    assert one.after.anonymous_bytes < two.after.anonymous_bytes
    assert two.after.pss_bytes < two.after.private_bytes + two.after.shared_bytes


@NEEDS_LINUX
def test_every_figure_is_json_and_text(diagnosis: Diagnosis) -> None:
    advice = ["do this", "do that"]
    content = json.loads(json.dumps({**asdict(diagnosis), "advice": advice}))
    assert [field.name for field in fields(Diagnosis)] == list(content)[:-1]
    text = findings_text(diagnosis, advice)
    titles = [line for line in text.splitlines()[1:] if line and not line.startswith(" ")]
    assert titles == [
        "machine",
        "how it is run",
        "matrix products of this machine, by the runtime itself",
        "seconds to open",
        "memory",
        "speed",
        "advice",
    ]
    assert f"onnxruntime        {onnxruntime.__version__} (" in text
    assert re.search(r"^  2 processes +before opening +after", text, re.MULTILINE)
    assert text.endswith("- do this\n  - do that")


def test_unknown_memory_is_reported_as_unknown(diagnosis: Diagnosis) -> None:
    elsewhere = replace(diagnosis, footprint=None, workers_footprint=None, opening_cold=None)
    text = findings_text(elsewhere, [])
    assert "\nmemory\n  not measured: this system does not tell it\n" in text
    assert "from disk, and packed into the cache: not measured" in text
    assert text.endswith("\nadvice\n  none")


def test_flops_are_those_that_torch_counts(checkpoint_dir: Path) -> None:
    model = load_checkpoint(checkpoint_dir).eval()
    ids = torch.ones(2, 24, dtype=torch.long)
    counter = FlopCounterMode(display=False)  # which knows no fused attention of a CPU
    with counter, torch.inference_mode(), sdpa_kernel(SDPBackend.MATH):
        model(Batch(ids=ids, types=torch.zeros_like(ids)))
    counts = counter.get_flop_counts()["Global"]
    products = {str(operator): count for operator, count in counts.items()}
    assert sum(products.values()) == encoder_flops(model.config, 2, 24)
    linear = sum(count for name, count in products.items() if "mm" in name and "bmm" not in name)
    assert linear == linear_flops(model.config, 2 * 24)


@given(
    rows=st.integers(1, 9),
    num_in=st.integers(1, 300),
    num_out=st.integers(1, 20),
    seed=st.integers(0),
)
def test_a_product_multiplies(rows: int, num_in: int, num_out: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    given_rows = generator.integers(0, 256, (rows, num_in), np.uint8)
    weight = generator.integers(-64, 65, (num_in, num_out), np.int8)
    expected = given_rows.astype(np.int64) @ weight.astype(np.int64)
    for kind, dtype, x in (("int8", np.int8, given_rows), ("fp32", np.float32, given_rows / 255)):
        product = Product(kind, weight.astype(dtype), RuntimeOptions(num_threads=1))  # type: ignore[arg-type]
        y = product.run(x if kind == "int8" else x.astype(np.float32))
        if kind == "int8":
            np.testing.assert_array_equal(y, expected)
        else:
            np.testing.assert_allclose(y * 255, expected, atol=0.5 + 1e-3 * num_in)


@pytest.mark.parametrize("kind", ["fp32", "int8"])
def test_the_stored_graph_of_a_product_is_its_scripts(kind: str) -> None:
    graph = product_graph(kind)
    onnx.checker.check_model(graph, full_check=True)
    assert (FOLDER / f"product-{kind}.onnx").read_bytes() == graph.SerializeToString()


@NEEDS_LINUX
def test_memory_grows_with_allocations(tmp_path: Path) -> None:
    before = read_memory()
    array = np.ones(64 << 20, np.uint8)
    after = read_memory()
    assert before is not None
    assert after is not None
    grown = after.anonymous_bytes - before.anonymous_bytes
    assert grown == pytest.approx(array.nbytes, rel=0.1)
    assert after.peak_bytes >= before.peak_bytes
    assert read_memory(tmp_path) is None


@pytest.mark.parametrize(("seconds", "num_runs"), [(0.0, 1), (0.2, 50)])
def test_timing_runs_at_least_once_and_not_for_ever(seconds: float, num_runs: int) -> None:
    calls: list[int] = []
    timing = time_runs(lambda: calls.append(1), budget_s=seconds)
    assert timing.num_runs == num_runs
    assert len(calls) in (num_runs, num_runs + 1)
    assert 0 <= timing.fastest_s <= timing.median_s


@NEEDS_LINUX
def test_a_killed_process_is_reported_as_killed(bundle_dir: Path) -> None:
    options = RuntimeOptions(device="cpu", num_threads=1)
    with _started(bundle_dir, options) as process:
        process.send("memory")
        assert process.receive()["pss_bytes"] > 0
        process.process.send_signal(signal.SIGKILL)
        process.send("open")
        with pytest.raises(EngineError, match="ended by signal 9; there may be too little memory"):
            process.receive()


@NEEDS_LINUX
def test_a_process_ends_with_the_one_that_asks(bundle_dir: Path) -> None:
    with _started(bundle_dir, RuntimeOptions(device="cpu", num_threads=1)) as process:
        pid = process.process.pid
    assert process.process.returncode == 0
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@NEEDS_LINUX
def test_a_child_process_error_is_raised(bundle_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(bundle_dir, folder)
    bundle = Bundle.open(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(EngineError, match=r"tokenizer\.json has 2 bytes; the manifest says"):
        measure_footprint(bundle, RuntimeOptions(device="cpu", num_threads=1), 1)


def write_groups(root: Path, groups: dict[str, str], membership: str) -> float | None:
    for name, content in groups.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    (root / "membership").write_text(membership)
    return cpu_quota(root, root / "membership")


@pytest.mark.parametrize(
    ("groups", "membership", "quota"),
    [
        pytest.param({"cpu.max": "150000 100000"}, "0::/\n", 1.5, id="container"),
        pytest.param({"cpu.max": "150000 100000"}, "0::/not/mounted\n", 1.5, id="other name"),
        pytest.param({"cpu.max": "max 100000"}, "0::/\n", None, id="no limit"),
        pytest.param({"a/b/cpu.max": "max 1", "a/cpu.max": "2 1"}, "0::/a/b\n", 2.0, id="above"),
        pytest.param({"a/b/cpu.max": "1 2", "a/cpu.max": "2 1"}, "0::/a/b\n", 0.5, id="lowest"),
        pytest.param({}, "0::/a\n", None, id="no file"),
        pytest.param({"cpu.max": "what"}, "0::/\n", None, id="not understood"),
        pytest.param(
            {"cpu/g/cpu.cfs_quota_us": "50000\n", "cpu/g/cpu.cfs_period_us": "100000\n"},
            "9:memory:/m\n4:cpu:/g\n",
            0.5,
            id="first version",
        ),
        pytest.param(
            {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
            "4:cpu:/\n",
            None,
            id="first version, no limit",
        ),
    ],
)
def test_the_limit_of_a_container_is_read(
    tmp_path: Path, groups: dict[str, str], membership: str, quota: float | None
) -> None:
    assert write_groups(tmp_path, groups, membership) == quota
    assert cpu_quota(tmp_path, tmp_path / "none") is None


def test_the_machine_is_this_one() -> None:
    machine = read_machine()
    assert machine.num_usable_cpus <= machine.num_cpus == os.cpu_count()
    assert machine.onnxruntime == onnxruntime.__version__
    assert "CPUExecutionProvider" in machine.providers
    assert machine.processor
    if Path("/proc/cpuinfo").is_file():
        flags = Path("/proc/cpuinfo").read_text().split()
        named = [*machine.int8_instructions, *machine.bf16_instructions]
        assert set(named) <= set(flags)
        assert ("avx512_vnni" in flags) == ("avx512_vnni" in machine.int8_instructions)


# Advice: pure, on figures that are set.


def speed(num_tokens: int, fastest_ms: float, **changes: Any) -> Speed:
    arguments = {
        "num_sequences": 1,
        "num_tokens": num_tokens,
        "num_runs": 10,
        "median_ms": fastest_ms,
        "fastest_ms": fastest_ms,
        "tokens_per_s": 1e3 * num_tokens / fastest_ms,
        "gflops_per_s": 100.0,
        "share_of_peak": 0.5,
    }
    return Speed(**(arguments | changes))


@pytest.fixture
def healthy(diagnosis: Diagnosis) -> Diagnosis:
    """One worker of one thread on 8 cores, steady, where int8 gains nothing."""
    machine = replace(
        diagnosis.machine,
        num_usable_cpus=8,
        cpu_quota=None,
        int8_instructions=["avx512_vnni"],
        no_cuda="no NVIDIA driver is installed",
    )
    return replace(
        diagnosis,
        machine=machine,
        num_workers=1,
        threads=1,
        spinning=True,
        prepack="memory",
        precision="fp32",
        products=Products(fp32_gflops_per_s=100.0, int8_gflops_per_s=100.0),
        workers_footprint=None,
        speeds=[speed(8, 1.0), speed(32, 2.0), speed(128, 8.0)],
    )


def assert_advice(diagnosis: Diagnosis, *parts: str) -> None:
    """One sentence, with all parts in it."""
    (sentence,) = advise(diagnosis)
    for part in parts:
        assert part in sentence


def test_no_advice_without_a_reason(healthy: Diagnosis) -> None:
    assert advise(healthy) == []


def test_int8_is_advised_where_its_products_are_faster(healthy: Diagnosis) -> None:
    flops = linear_flops(healthy.config, 128)
    fast = Products(fp32_gflops_per_s=100.0, int8_gflops_per_s=400.0)
    # Half of the time is that of products at their peak, of which a quarter is left.
    half = [speed(8, 1.0), speed(128, 2 * 1e-6 * flops / 100.0)]
    diagnosis = replace(healthy, products=fast, speeds=half)
    assert list(int8_speedup(diagnosis)) == pytest.approx([1 / (1 - 0.5 * 0.75), 4.0])
    assert_advice(diagnosis, "int8 would be 1.6 to 4.0 times as fast at 128 tokens", "avx512_vnni")
    assert advise(replace(diagnosis, precision="int8")) == []
    assert advise(replace(diagnosis, device="cuda")) == []
    assert advise(replace(diagnosis, speeds=[speed(128, 1e3)])) == []  # hardly a product in it


def test_int8_is_advised_against_where_its_products_are_slow(healthy: Diagnosis) -> None:
    assert_advice(replace(healthy, precision="int8"), "only 1.0 times", "an fp32 bundle")


@pytest.mark.parametrize(
    ("num_workers", "threads", "fitting"), [(1, 9, 8), (4, 8, 2), (3, 4, 2), (8, 2, 1)]
)
def test_more_threads_than_cores_are_advised_against(
    healthy: Diagnosis, num_workers: int, threads: int, fitting: int
) -> None:
    diagnosis = replace(healthy, num_workers=num_workers, threads=threads)
    expected = f"{num_workers} x {threads} threads are more than the 8 cores"
    assert_advice(diagnosis, expected, f"ALBERT_SERVE_THREADS={fitting}")
    assert advise(replace(diagnosis, device="cuda", num_workers=1)) == []


def test_more_workers_than_cores_should_not_spin(healthy: Diagnosis) -> None:
    threads, spinning = advise(replace(healthy, num_workers=9))
    assert "ALBERT_SERVE_THREADS=1" in threads
    assert "ALBERT_SERVE_SPINNING=off" in spinning


def test_threads_are_held_against_the_limit_of_a_container(healthy: Diagnosis) -> None:
    machine = replace(healthy.machine, cpu_quota=2.5)
    diagnosis = replace(healthy, machine=machine, threads=4)
    assert_advice(diagnosis, "held to 2.5 processors' worth of time", "ALBERT_SERVE_THREADS=2")
    assert advise(replace(diagnosis, threads=2)) == []


def test_workers_that_share_nothing_are_advised_to_use_the_cache(healthy: Diagnosis) -> None:
    footprint = healthy.footprint
    assert footprint is not None
    weights = healthy.weights_bytes
    after = replace(
        footprint.before, anonymous_bytes=footprint.before.anonymous_bytes + 4 * weights
    )
    several = Footprint(
        num_processes=4,
        before=footprint.before,
        after=after,
        bundle_pss_bytes=4 * weights,
        bundle_over_weights=4.0,
        weights_pss_bytes=4 * weights,
        weights_over_file=4.0,
        opening=[],
    )
    diagnosis = replace(healthy, num_workers=4, workers_footprint=several)
    assert_advice(diagnosis, "4 workers do not share", "ALBERT_SERVE_PREPACK=cache")
    assert advise(replace(diagnosis, prepack="cache")) == []
    shared = replace(several, after=footprint.before)
    assert advise(replace(diagnosis, workers_footprint=shared)) == []


def test_unpacked_weights_give_advice_where_short_texts_suffer(healthy: Diagnosis) -> None:
    slow = [speed(8, 1.0, gflops_per_s=20.0), speed(128, 8.0, gflops_per_s=100.0)]
    diagnosis = replace(healthy, prepack="none", speeds=slow)
    assert_advice(diagnosis, "at 8 tokens it computes at 20% of the speed of 128 tokens")
    assert advise(replace(diagnosis, prepack="memory")) == []
    assert advise(replace(diagnosis, speeds=slow[1:])) == []


def test_devices(healthy: Diagnosis) -> None:
    machine = replace(healthy.machine, no_cuda=None)
    assert_advice(replace(healthy, machine=machine), "ALBERT_SERVE_DEVICE=auto")
    on_cuda = replace(healthy, machine=machine, device="cuda")
    assert advise(on_cuda) == []
    assert_advice(replace(on_cuda, num_workers=2), "ALBERT_SERVE_WORKERS=1")


@pytest.mark.parametrize(
    ("medians", "is_told"), [([2.0, 2.0], True), ([2.0, 1.0], True), ([1.0, 1.1], False)]
)
def test_unsteady_times_are_reported(
    healthy: Diagnosis, medians: Sequence[float], is_told: bool
) -> None:
    speeds = [speed(8 * (i + 1), 1.0, median_ms=median) for i, median in enumerate(medians)]
    single = speed(128, 1.0, median_ms=9.0, num_runs=1)
    diagnosis = replace(healthy, speeds=[*speeds, single])
    assert ["not steady" in sentence for sentence in advise(diagnosis)] == [True] * is_told
