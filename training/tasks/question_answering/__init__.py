"""Extractive question answering: files, loss and metrics."""
