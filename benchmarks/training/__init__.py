"""Training with this package, compared with the `Trainer` of `transformers`."""
