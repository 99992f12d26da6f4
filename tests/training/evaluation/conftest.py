"""The checkpoints of other packages' tests: random weights, a vocabulary of real pieces."""

from __future__ import annotations

from tests.albert_serve.conftest import bundle_dir, checkpoint_dir
from tests.export.conftest import real_checkpoint

__all__ = ["bundle_dir", "checkpoint_dir", "real_checkpoint"]
