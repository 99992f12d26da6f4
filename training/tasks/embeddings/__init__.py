"""Embeddings of texts: files, loss and metrics."""
