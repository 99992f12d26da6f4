"""Extractive question answering: a span of a context."""
