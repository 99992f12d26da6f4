"""Inference with this package, compared with other runtimes."""
