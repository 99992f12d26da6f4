"""Batch scoring: files and tables, resumable, and a scorer for pipelines on many machines."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from albert_serve.scoring.scorer import AlbertScorer

__all__ = ["AlbertScorer"]


def __getattr__(name: str) -> Any:
    """Import the scorer on first use, because the command line reads options without pyarrow."""
    if name == "AlbertScorer":
        from albert_serve.scoring.scorer import AlbertScorer

        return AlbertScorer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
