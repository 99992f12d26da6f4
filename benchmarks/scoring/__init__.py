"""What `benchmarks.score` compares."""
