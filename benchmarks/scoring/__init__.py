"""The contestants of `benchmarks.score`."""
