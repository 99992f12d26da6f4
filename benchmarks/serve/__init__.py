"""The service of this package, compared with `transformers` pipelines in BentoML."""
