"""The checkpoint and the bundle of the service's tests."""

from __future__ import annotations

from tests.albert_serve.conftest import bundle_dir, checkpoint_dir

__all__ = ["bundle_dir", "checkpoint_dir"]
