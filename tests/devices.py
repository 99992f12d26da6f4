"""The devices that tests run on: always the CPU, and a GPU by `make test-gpu`."""

from __future__ import annotations

from typing import Final

import pytest

CUDA: Final = pytest.param("cuda", marks=pytest.mark.gpu)
each_device: Final = pytest.mark.parametrize("device", ["cpu", CUDA])
