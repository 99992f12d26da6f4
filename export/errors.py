"""What stops an export."""

from __future__ import annotations


class ExportError(ValueError):
    """A checkpoint that cannot be exported, or a bundle that would not be as good as it."""
