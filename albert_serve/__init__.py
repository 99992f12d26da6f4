"""ALBERT in production: one stored layer, four tasks, over HTTP, from Python and in batch."""

__version__ = "0.1.0"
