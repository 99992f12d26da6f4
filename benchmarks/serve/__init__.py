"""The service of this package, against BentoML over pipelines of `transformers`."""
