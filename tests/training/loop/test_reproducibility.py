"""A step has the same result each time, on all threads, and a run has one precision."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.training.support import TINY, pretend_bf16, stop_at
from training.commands import pretrain
from training.loop.distributed import World
from training.loop.progress import run_precision
from training.loop.step import reproducible
from training.model.albert import Embeddings
from training.system import precision as precision_module
from training.system.precision import cpu_has_bf16, cpu_is_faster_in_bf16, precision, product_dtype

CPU = torch.device("cpu")
NUM_TOKENS = 4096


@pytest.fixture
def threads() -> Iterator[int]:
    """As many as the machine has cores, and two at least."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(2, os.cpu_count() or 2))
    yield torch.get_num_threads()
    torch.set_num_threads(before)


def gradients(*, compiles: bool) -> Iterator[list[Tensor]]:
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
    run = torch.compile(loss) if compiles else loss
    while True:
        embeddings.zero_grad()
        run(ids, types, positions).backward()  # type: ignore[no-untyped-call]
        yield [
            parameter.grad for parameter in embeddings.parameters() if parameter.grad is not None
        ]


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")  # torch's own
@pytest.mark.parametrize(
    "compiles", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"]
)
def test_sums_by_index_are_the_same_to_the_bit_each_time(threads: int, compiles: bool) -> None:
    """Threads that add to one row in the order in which they come differ within a few times."""
    with reproducible(CPU):
        repeated = gradients(compiles=compiles)
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


WITH_BF16: list[dict[str, Any]] = [
    {"architecture": "x86_64", "avx2": True, "avx512_f": True, "avx512_bf16": True},
    {"architecture": "x86_64", "avx2": True, "amx_bf16": True, "avx512_bf16": False},
    {"architecture": "arm64", "neon": True, "bf16": True, "sve_max_length": 0},
]
WITHOUT_BF16: list[dict[str, Any]] = [
    {"architecture": "x86_64", "avx2": True, "avx512_f": True, "avx512_vnni": True},
    {"architecture": "arm64", "neon": True, "bf16": False, "sve_bf16": False},
]
CASES = [(each, torch.bfloat16) for each in WITH_BF16]
CASES += [(each, torch.float32) for each in WITHOUT_BF16]


@pytest.fixture(autouse=True)
def measured_anew() -> Iterator[None]:
    cpu_is_faster_in_bf16.cache_clear()
    yield
    cpu_is_faster_in_bf16.cache_clear()


@pytest.mark.parametrize(("capabilities", "dtype"), CASES)
def test_without_instructions_bf16_is_not_measured(
    capabilities: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[torch.dtype] = []
    seconds = {torch.bfloat16: 1.0, torch.float32: 2.0}

    def product_s(dtype: torch.dtype) -> float:
        measured.append(dtype)
        return seconds[dtype]

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    monkeypatch.setattr(precision_module, "_product_s", product_s)
    assert cpu_has_bf16() == (dtype == torch.bfloat16)
    assert product_dtype(CPU) == dtype
    assert set(measured) == (set(seconds) if cpu_has_bf16() else set())
    matrix = torch.ones(2, 2)
    with precision(CPU):
        assert (matrix @ matrix).dtype == dtype
    assert (matrix @ matrix).dtype == torch.float32
    assert len(measured) <= 2, "measured once"


def test_a_cpu_slower_in_bf16_multiplies_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {torch.bfloat16: 2.0, torch.float32: 1.0}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: WITH_BF16[0])
    monkeypatch.setattr(precision_module, "_product_s", seconds.__getitem__)
    assert product_dtype(CPU) == torch.float32


def test_the_capabilities_are_this_cpus() -> None:
    """Under the names that torch has for it: one of them is known on each architecture."""
    names = torch.cpu.get_capabilities().keys()
    assert {"avx512_bf16", "amx_bf16"} <= names or "bf16" in names
    assert product_dtype(CPU) in (torch.bfloat16, torch.float32)
