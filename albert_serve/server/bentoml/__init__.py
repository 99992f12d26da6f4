"""All code that depends on BentoML's internals."""
