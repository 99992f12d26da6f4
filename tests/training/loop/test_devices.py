"""Training on each device: its precisions, loss scale, memory and reproducible sums."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.devices import each_device
from tests.training.loop.stub import Stub, train
from tests.training.processes import (
    before_step,
    check_ended,
    raise_signals,
    run_in_process,
    run_processes,
)
from tests.training.support import TINY, checkpoint_state, pretend_bf16, read_metrics
from training.errors import RunError
from training.loop.distributed import World
from training.loop.progress import record_run, run_precision
from training.loop.step import reproducible
from training.model.albert import Embeddings
from training.system import precision as precision_module
from training.system.precision import cpu_is_faster_in_bf16, is_ampere, precision, product_dtype


def test_gpus_from_ampere_on_are_recognised_by_their_compute_capability() -> None:
    capabilities = {"T4": (7, 5), "A100": (8, 0), "B200": (10, 0)}
    ampere_or_newer = [gpu for gpu, capability in capabilities.items() if is_ampere(capability)]
    assert ampere_or_newer == ["A100", "B200"]


def losses(folder: Path) -> list[float]:
    return [line["fill-mask/loss"] for line in read_metrics(folder)]


@each_device
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    "compiles", ["--no-compile", pytest.param("--compile", marks=pytest.mark.slow)]
)
def test_every_precision_on_every_device_trains_as_fp32_on_a_cpu(
    tiny_options: list[str], tmp_path: Path, device: str, precision: str, compiles: str
) -> None:
    """The run is interrupted. It has no dropout, because dropout masks depend on the device.

    Rows are packed, so a GPU uses the attention kernel for sequences of variable length.
    """
    options = [*tiny_options, "--optimizer", "adamw", "--lr", "1e-3", "--dropout", "v2"]
    exact, run = tmp_path / "exact", tmp_path / "run"
    assert run_in_process([*options, "--precision", "fp32"], exact).status == 0
    options += ["--device", device, "--precision", precision, compiles]
    hook = partial(before_step, 4, partial(raise_signals, signal.SIGTERM))
    assert run_in_process(options, run, hook=hook).status == 128 + signal.SIGTERM
    assert run_in_process(options, run).status == 0
    assert losses(run) == pytest.approx(losses(exact), rel=1e-4 if precision == "fp32" else 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("compiles", ["--no-compile", "--compile"])
def test_many_gpus_train_as_a_cpu(tiny_options: list[str], tmp_path: Path, compiles: str) -> None:
    """Up to four GPUs communicate by NCCL."""
    if torch.cuda.device_count() < 2:
        pytest.skip("DDP wraps the model on two GPUs or more")
    options = [*tiny_options, "--optimizer", "adamw", "--lr", "1e-3", "--precision", "fp32"]
    options += ["--micro-batch-size", "2", "--dropout", "v2"]
    assert run_in_process(options, tmp_path / "exact").status == 0
    count = 1 << min(2, torch.cuda.device_count().bit_length() - 1)
    options += ["--device", "cuda", compiles]
    check_ended(run_processes(options, tmp_path / "run", num_processes=count))
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "exact"), rel=1e-4)


def scale_of(run: Path) -> tuple[float, int]:
    """Return the loss scale, and the number of steps since it last changed."""
    scaler = checkpoint_state(run)["stability"]["scaler"]
    return scaler["scale"], scaler["_growth_tracker"]


def test_fp16_halves_the_loss_scale_after_a_gradient_that_is_not_finite(tmp_path: Path) -> None:
    """The run does not end while a smaller scale may help."""
    train(tmp_path, Stub(spoiled=range(2, 9)), precision="fp16")
    assert scale_of(tmp_path) == (512, 0)
    train(tmp_path, precision="fp16", num_steps=10)
    assert scale_of(tmp_path) == (512, 2)
    stub = Stub(spoiled=range(11, 30))
    with pytest.raises(RunError, match="not finite in 5 consecutive steps"):
        train(tmp_path, stub, precision="fp16", num_steps=30)
    assert stub.num_taken == 10 + 9 + 5  # nine of these steps reduced the scale to 1


def test_a_device_out_of_memory_ends_the_run_with_advice(tmp_path: Path) -> None:
    def run_out_of_memory() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with pytest.raises(RunError, match=r"^CUDA out of memory\. .*--micro-batch-size"):
        train(tmp_path, Stub(before={3: run_out_of_memory}))
    assert train(tmp_path).status == 0


CPU = torch.device("cpu")


@pytest.fixture
def threads() -> Iterator[None]:
    """One thread of torch per core, and at least two."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(max(2, os.cpu_count() or 2))
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.usefixtures("threads")
def test_sums_by_index_are_identical_each_time() -> None:
    """The gradients sum over few rows, each selected many times.

    If threads add to a row in the order of their arrival, the sums differ within a few trials.
    """
    torch.manual_seed(0)
    embeddings, rows = Embeddings(TINY), torch.randint(8, (4096,))
    sizes = (TINY.vocab_size, TINY.num_token_types, TINY.max_positions)
    inputs = [torch.randint(size, (32, 128)) for size in sizes]
    weights = torch.randn(4096, TINY.hidden_size)
    gradients = []
    with reproducible(CPU):
        for _ in range(30):
            embeddings.zero_grad()
            x_BSH: Tensor = embeddings(*inputs)
            (x_BSH.flatten(0, 1)[rows] * weights).sum().backward()  # type: ignore[no-untyped-call]
            gradients.append([p.grad for p in embeddings.parameters() if p.grad is not None])
    assert len(gradients[0]) == 7
    assert all(all(map(torch.equal, *pair)) for pair in pairwise(gradients))
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_resumed_run_keeps_its_recorded_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The machine may measure another one by then. A CPU that emulates bf16 causes a warning."""
    pretend_bf16(monkeypatch, False)
    assert run_precision("auto", tmp_path, World()) == "fp32"
    assert run_precision("fp16", tmp_path, World()) == "fp16"
    assert capsys.readouterr().err == ""
    record_run(tmp_path, {"precision": "bf16"})
    assert run_precision("auto", tmp_path, World()) == "bf16"
    assert capsys.readouterr().err == "warning: This CPU emulates bf16, which is very slow.\n"
    with pytest.raises(RunError, match="contains a run with precision 'bf16', not 'fp32'"):
        run_precision("fp32", tmp_path, World())
    pretend_bf16(monkeypatch, True)
    assert run_precision("bf16", tmp_path, World()) == "bf16"
    assert capsys.readouterr().err == ""


@pytest.fixture(autouse=True)
def uncached_measurement() -> Iterator[None]:
    cpu_is_faster_in_bf16.cache_clear()
    yield
    cpu_is_faster_in_bf16.cache_clear()


@pytest.mark.parametrize(
    ("capabilities", "bf16_s", "dtype"),
    [
        ({"avx512_f": True, "avx512_bf16": True}, 1.9, torch.bfloat16),
        ({"avx512_bf16": True}, 2.0, torch.float32),
        ({"avx512_f": True, "avx512_vnni": True, "bf16": False}, None, torch.float32),
    ],
)
def test_products_use_bf16_if_its_instructions_are_faster(
    capabilities: dict[str, bool],
    bf16_s: float | None,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The speed is measured once, and only on CPUs with bf16 instructions."""
    measured_dtypes: list[torch.dtype] = []
    seconds = {torch.bfloat16: bf16_s, torch.float32: 2.0}

    def product_s(dtype: torch.dtype) -> float | None:
        measured_dtypes.append(dtype)
        return seconds[dtype]

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    monkeypatch.setattr(precision_module, "_product_s", product_s)
    matrix = torch.ones(2, 2)
    assert product_dtype(CPU) == dtype
    with precision(CPU):
        assert (matrix @ matrix).dtype == dtype
    assert (matrix @ matrix).dtype == torch.float32
    assert len(measured_dtypes) == (0 if bf16_s is None else 2)
