"""Batch scoring: files and tables, resumable, in process, by a service, or on many machines."""

from albert_serve.scoring.distributed.scorer import AlbertScorer

__all__ = ["AlbertScorer"]
