"""The devices that tests run on: always the CPU, and a GPU by `make test-gpu`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

CUDA: Final = pytest.param("cuda", marks=pytest.mark.gpu)
each_device: Final = pytest.mark.parametrize("device", ["cpu", CUDA])

_TESTS: Final = Path(__file__).parent


def skip_without_gpu(item: pytest.Item) -> None:
    """Skip a test that is marked `gpu`, with the reason, if its library cannot use CUDA.

    Tests of training need only torch; all other tests run ONNX Runtime.
    """
    if item.get_closest_marker("gpu") is None:
        return
    reason: str | None
    if item.path.is_relative_to(_TESTS / "training"):
        import torch

        reason = None if torch.cuda.is_available() else "torch finds no CUDA device"
    else:
        from albert_serve.runtime.cuda import no_cuda_reason

        reason = no_cuda_reason()
    if reason is not None:
        pytest.skip(f"needs a GPU (make test-gpu): {reason}")
