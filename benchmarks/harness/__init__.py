"""Shared parts of the benchmarks: processes that take turns, checkpoints, texts and tables."""
