"""The checkpoint of the export's tests: random weights, a vocabulary of real pieces."""

from __future__ import annotations

from tests.export.conftest import real_checkpoint

__all__ = ["real_checkpoint"]
