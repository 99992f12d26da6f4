"""Training on each device, and what it lacks: bf16, range, memory, a fixed order of sums."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.devices import each_device
from tests.training.processes import (
    before_step,
    get_signals,
    lack_memory,
    run_in_process,
    run_world,
    spoil,
)
from tests.training.support import TINY, checkpoint_state, pretend_bf16, read_metrics, stop_at
from training.commands import pretrain
from training.loop.distributed import World
from training.loop.progress import run_precision
from training.loop.step import reproducible
from training.model.albert import Embeddings
from training.system import precision as precision_module
from training.system.precision import (
    cpu_has_bf16,
    cpu_is_faster_in_bf16,
    is_ampere,
    precision,
    product_dtype,
)


def test_kernels_and_precision_are_those_of_the_card() -> None:
    capabilities = {"T4": (7, 5), "A100": (8, 0), "B200": (10, 0)}
    new = [card for card, capability in capabilities.items() if is_ampere(capability)]
    assert new == ["A100", "B200"]


def losses(folder: Path) -> list[float]:
    return [line["fill-mask/loss"] for line in read_metrics(folder)]


@each_device
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    "compiles", ["--no-compile", pytest.param("--compile", marks=pytest.mark.slow)]
)
def test_every_precision_trains_as_fp32_on_a_cpu_does(
    tiny_options: list[str],
    tmp_path: Path,
    device: str,
    precision: str,
    compiles: str,
) -> None:
    """On packed rows, on a GPU by the kernel of variable lengths; interrupted amidst.

    Without dropout, whose masks depend on the device.
    """
    options = [*tiny_options, "--optimizer", "adamw", "--lr", "1e-3", "--dropout", "v2"]
    exact, run = tmp_path / "exact", tmp_path / "run"
    assert run_in_process([*options, "--precision", "fp32"], exact).status == 0
    options += ["--device", device, "--precision", precision, compiles]
    fate = partial(before_step, 4, partial(get_signals, signal.SIGTERM))
    assert run_in_process(options, run, fate=fate).status == 128 + signal.SIGTERM
    assert run_in_process(options, run).status == 0
    assert losses(run) == pytest.approx(losses(exact), rel=1e-4 if precision == "fp32" else 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("compiles", ["--no-compile", "--compile"])
def test_several_gpus_train_as_a_cpu_does(
    tiny_options: list[str], tmp_path: Path, compiles: str
) -> None:
    """By NCCL, on up to four devices."""
    if torch.cuda.device_count() < 2:
        pytest.skip("DDP wraps the model on two GPUs or more")
    options = [*tiny_options, "--optimizer", "adamw", "--lr", "1e-3", "--precision", "fp32"]
    options += ["--micro-batch-size", "2", "--dropout", "v2"]
    assert run_in_process(options, tmp_path / "exact").status == 0
    count = 1 << min(2, torch.cuda.device_count().bit_length() - 1)
    more = ("--device", "cuda", compiles)
    ended = run_world(options, tmp_path / "run", *more, num_processes=count)
    assert [process.status for process in ended] == [0] * count, ended
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "exact"), rel=1e-4)


def scale_of(run: Path) -> tuple[float, int]:
    """The loss scale, and the steps since it last changed."""
    scaler = checkpoint_state(run)["stability"]["scaler"]
    return scaler["scale"], scaler["_growth_tracker"]


@each_device
def test_fp16_scales_its_losses(tiny_options: list[str], tmp_path: Path, device: str) -> None:
    """A gradient that is not finite halves the scale, and ends no run while that may help."""
    options = [*tiny_options, "--optimizer", "adamw", "--lr", "1e-3", "--device", device]
    fp16, run = [*options, "--precision", "fp16"], tmp_path / "run"
    assert run_in_process(fp16, run).status == 0
    assert scale_of(run) == (65536, 8)
    left_out = tmp_path / "left-out"
    ended = run_in_process(fp16, left_out, "--keep", "9", fate=partial(spoil, range(2, 9)))
    assert ended.status == 0, ended.err
    assert scale_of(left_out) == (512, 0)
    assert run_in_process(fp16, left_out, "--steps", "10").status == 0
    assert scale_of(left_out) == (512, 2)


@each_device
def test_a_device_without_memory_ends_the_run_and_smaller_micro_batches_resume_it(
    tiny_options: list[str], tmp_path: Path, device: str
) -> None:
    options = [*tiny_options, "--precision", "fp32", "--device", device, "--dropout", "v2"]
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert run_in_process(options, whole).status == 0
    ended = run_in_process(options, run, fate=partial(lack_memory, 2))
    assert ended.status == 1
    assert ended.err.splitlines()[-1] == (
        "error: CUDA out of memory. Give a smaller --micro-batch-size, a shorter --length, or "
        "--recompute in pretraining"
    )
    options += ["--micro-batch-size", "2"]
    assert run_in_process(options, run, fate=partial(lack_memory, 2)).status == 0
    assert losses(run) == pytest.approx(losses(whole), rel=1e-4)


CPU = torch.device("cpu")
NUM_TOKENS = 4096


@pytest.fixture
def threads() -> Iterator[int]:
    """As many as the machine has cores, and two at least."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(2, os.cpu_count() or 2))
    yield torch.get_num_threads()
    torch.set_num_threads(before)


def gradients() -> Iterator[list[Tensor]]:
    """The gradients of embeddings of which a few rows are read, each many times."""
    torch.manual_seed(0)
    embeddings = Embeddings(TINY)

    def loss(ids: Tensor, types: Tensor, positions: Tensor) -> Tensor:
        x_BSH: Tensor = embeddings(ids, types, positions)
        return (x_BSH.flatten(0, 1)[read] * weights).sum()

    ids, types, positions = (
        torch.randint(size, (32, NUM_TOKENS // 32))
        for size in (TINY.vocab_size, TINY.num_token_types, TINY.max_positions)
    )
    read = torch.randint(8, (NUM_TOKENS,))
    weights = torch.randn(NUM_TOKENS, TINY.hidden_size)
    while True:
        embeddings.zero_grad()
        loss(ids, types, positions).backward()  # type: ignore[no-untyped-call]
        yield [
            parameter.grad for parameter in embeddings.parameters() if parameter.grad is not None
        ]


def test_sums_by_index_are_the_same_to_the_bit_each_time(threads: int) -> None:
    """Threads that add to one row in the order in which they come differ within a few times."""
    with reproducible(CPU):
        repeated = gradients()
        first = next(repeated)
        for _ in range(30):
            assert all(map(torch.equal, first, next(repeated)))
    assert len(first) == 7


def test_a_cpu_that_emulates_bf16_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend_bf16(monkeypatch, False)
    assert run_precision("auto", tmp_path, World()) == "fp32"
    assert capsys.readouterr().err == ""
    assert run_precision("bf16", tmp_path, World()) == "bf16"
    assert capsys.readouterr().err == "warning: this CPU emulates bf16, which is very slow\n"


def test_a_run_that_is_resumed_keeps_its_precision(
    pretrain_options: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whatever the machine measures by then."""
    options = [*pretrain_options, "--steps", "4", "--output", str(tmp_path)]
    with monkeypatch.context() as patch:
        pretend_bf16(patch, True)
        stop_at(patch, 2, signal.SIGTERM)
        assert pretrain.main(options) == 128 + signal.SIGTERM
    pretend_bf16(monkeypatch, False)
    assert pretrain.main([*options, "--precision", "fp32"]) == 1
    assert "holds a run with precision 'bf16', not 'fp32'" in capsys.readouterr().err
    assert pretrain.main(options) == 0
    assert json.loads((tmp_path / "run.json").read_text())["precision"] == "bf16"


@pytest.fixture(autouse=True)
def measured_anew() -> Iterator[None]:
    cpu_is_faster_in_bf16.cache_clear()
    yield
    cpu_is_faster_in_bf16.cache_clear()


@pytest.mark.parametrize(
    ("capabilities", "bf16_s", "dtype"),
    [
        ({"avx512_f": True, "avx512_bf16": True}, 1.9, torch.bfloat16),
        ({"amx_bf16": True, "avx512_bf16": False}, 1.9, torch.bfloat16),
        ({"neon": True, "bf16": True}, 1.9, torch.bfloat16),
        ({"avx512_bf16": True}, 2.0, torch.float32),
        ({"avx512_f": True, "avx512_vnni": True}, None, torch.float32),
        ({"neon": True, "bf16": False, "sve_bf16": False}, None, torch.float32),
    ],
)
def test_products_are_in_bf16_where_its_instructions_are_faster(
    capabilities: dict[str, bool],
    bf16_s: float | None,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is measured once, and not without the instructions."""
    measured: list[torch.dtype] = []
    seconds = {torch.bfloat16: bf16_s, torch.float32: 2.0}

    def product_s(dtype: torch.dtype) -> float | None:
        measured.append(dtype)
        return seconds[dtype]

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    monkeypatch.setattr(precision_module, "_product_s", product_s)
    assert cpu_has_bf16() == (bf16_s is not None)
    assert product_dtype(CPU) == dtype
    matrix = torch.ones(2, 2)
    with precision(CPU):
        assert (matrix @ matrix).dtype == dtype
    assert (matrix @ matrix).dtype == torch.float32
    assert len(measured) == (2 if cpu_has_bf16() else 0)


def test_the_capabilities_are_this_cpus() -> None:
    """Under the names that torch has for it: one of them is known on each architecture."""
    names = torch.cpu.get_capabilities().keys()
    assert {"avx512_bf16", "amx_bf16"} <= names or "bf16" in names
    assert product_dtype(CPU) in (torch.bfloat16, torch.float32)
