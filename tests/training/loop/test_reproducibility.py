"""A step has the same result each time, on all threads, and a run has one precision."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.training.support import TINY, pretend_bf16, stop_at
from training.commands import pretrain
from training.errors import RunError
from training.loop.distributed import World
from training.loop.progress import record_run
from training.loop.reproducibility import reproducible, run_precision
from training.model.albert import Embeddings

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


def test_the_precision_of_a_run_is_measured_at_its_first_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_bf16(monkeypatch, True)
    assert run_precision("auto", tmp_path, World()) == "bf16"
    record_run(tmp_path, {"precision": "bf16"})
    monkeypatch.setattr("training.system.precision.cpu_is_faster_in_bf16", lambda: False)
    assert run_precision("auto", tmp_path, World()) == "bf16"
    assert run_precision("bf16", tmp_path, World()) == "bf16"
    assert run_precision("auto", tmp_path / "new", World()) == "fp32"
    assert run_precision("bf16", tmp_path / "new", World()) == "bf16"
    with pytest.raises(RunError, match="holds a run with precision 'bf16', not 'fp32'"):
        run_precision("fp32", tmp_path, World())


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
