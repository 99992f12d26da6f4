"""Masked tokens and sentence order on plain text: files, loss and metrics."""
