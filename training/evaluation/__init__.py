"""Evaluation on held-out data."""
