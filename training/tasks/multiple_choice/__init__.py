"""Multiple choice: files, loss and metrics."""
