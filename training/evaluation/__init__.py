"""Metrics on held-out data."""
