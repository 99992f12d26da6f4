"""Exceptions of the export."""

from __future__ import annotations

from training.errors import TrainingError


class ExportError(TrainingError):
    """A checkpoint that cannot be exported, or a bundle that is worse than its checkpoint."""
