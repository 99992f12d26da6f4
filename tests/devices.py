"""The devices that the same tests run on: the CPU everywhere, a GPU by `make test-gpu`."""

from __future__ import annotations

from typing import Final

import pytest

from albert_serve.runtime.cuda import no_cuda_reason

CUDA: Final = pytest.param("cuda", marks=pytest.mark.gpu)
each_device: Final = pytest.mark.parametrize("device", ["cpu", CUDA])


def skip_without_gpu(item: pytest.Item) -> None:
    """Skip a test that is marked `gpu` where CUDA cannot be used, and say why."""
    if item.get_closest_marker("gpu") and (reason := no_cuda_reason()) is not None:
        pytest.skip(f"needs a GPU (make test-gpu): {reason}")
