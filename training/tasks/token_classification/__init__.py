"""Token classification: files, loss and metrics."""
