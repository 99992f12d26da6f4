"""Shared by the benchmarks: processes that take turns, services, load, texts and tables."""
