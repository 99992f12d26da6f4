"""Text classification: files, loss and metrics."""
