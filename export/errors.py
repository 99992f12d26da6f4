"""Exceptions of the export."""

from __future__ import annotations


class ExportError(ValueError):
    """A checkpoint that cannot be exported, or a bundle that is worse than its checkpoint."""
