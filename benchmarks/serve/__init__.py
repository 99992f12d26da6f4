"""The service of this package, compared with BentoML over pipelines of `transformers`."""
