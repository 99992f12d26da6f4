"""Shared by the benchmarks: processes that take turns, services, load, and tables."""
