"""Training on a CPU and on a GPU, and what a device lacks: bf16, range of fp16, memory."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.devices import each_device
from tests.training.processes import (
    before_step,
    get_signals,
    lack_memory,
    run_in_process,
    run_world,
    spoil,
)
from tests.training.support import checkpoint_state, read_metrics
from training.system.precision import is_ampere


def test_kernels_and_precision_are_those_of_the_card() -> None:
    capabilities = {"T4": (7, 5), "A100": (8, 0), "B200": (10, 0)}
    new = [card for card, capability in capabilities.items() if is_ampere(capability)]
    assert new == ["A100", "B200"]


def difference(one: Path, other: Path) -> float:
    """The largest of two runs' weights."""
    tensors = [load_file(folder / "checkpoint" / "model.safetensors") for folder in (one, other)]
    return max(float((each - tensors[1][name]).abs().max()) for name, each in tensors[0].items())


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


def scale_of(run: Path) -> tuple[float, int]:
    """The loss scale, and the steps since it last changed."""
    scaler = checkpoint_state(run)["stability"]["scaler"]
    return scaler["scale"], scaler["_growth_tracker"]


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
    assert difference(run, whole) < 3e-5
